"""A simulated asynchronous device: CPU memory that behaves like an accelerator's, only worse.

Every stream is a queue that moves only when somebody steps it; a fence is reached only when its
queue gets there; host buffers are poisoned until their copy has run, device memory as soon as it
is free; faults happen on demand. Whatever a real device may do late, this one does as late as
its pacing wants, and a program that forgot to wait reads poison.
"""

from slotmirror.conformance.simulated.backend import SimulatedBackend
from slotmirror.conformance.simulated.faults import FaultKind, FaultPlan, InjectedFault
from slotmirror.conformance.simulated.pacing import Pacing, SelfPaced
from slotmirror.conformance.simulated.profiles import PROFILES, Profile

__all__ = [
    "PROFILES",
    "FaultKind",
    "FaultPlan",
    "InjectedFault",
    "Pacing",
    "Profile",
    "SelfPaced",
    "SimulatedBackend",
]
