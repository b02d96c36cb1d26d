"""Imported before anything that imports torch.

torch loads every installed device extension when it is imported, and one whose vendor runtime is
missing then makes `import torch` itself fail, for good. The commands must be able to say so. A
backend that is selected imports its extension itself.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
