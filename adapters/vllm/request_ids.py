"""The ids that requests have inside the engine, and those that its users know."""

from __future__ import annotations

import re


def is_request_of(engine_id: str, request_id: str) -> bool:
    """Whether the worker's `engine_id` belongs to the user's `request_id`.

    vLLM appends `-` and eight hexadecimal digits, and puts `K_` before the K-th sample of a
    request with n > 1.
    """
    pattern = rf"(\d+_)?{re.escape(request_id)}(-[0-9a-f]{{8}})?"
    return re.fullmatch(pattern, engine_id) is not None
