"""Replays vectors taken from the real vLLM and reports every difference.

`replay_file(path)` is what the command line and the tests call; the format of the files is
described in `docs/kv-prefix-cache.md`.
"""

from slotmirror.engine.golden_replay.differences import Difference, ReplayReport
from slotmirror.engine.golden_replay.errors import VectorFileError
from slotmirror.engine.golden_replay.replay import replay, replay_file, replay_report

__all__ = [
    "Difference",
    "ReplayReport",
    "VectorFileError",
    "replay",
    "replay_file",
    "replay_report",
]
