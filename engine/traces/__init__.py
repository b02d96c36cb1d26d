"""Readers of conversation files and block traces: text lines in, engine requests out.

Three formats, told apart by the first line that is not blank:

* **chat**: ``{"messages": [{"role": "system", "content": "..."}, ...]}``, one conversation a line;
* **mooncake**: ``{"timestamp": .., "input_length": .., "output_length": .., "hash_ids": [..]}``,
  one request a line, its prompt given as ids of 512-token blocks;
* **bailian**: the same with ``chat_id``, ``parent_chat_id``, ``type`` and ``turn``, and ids of
  16-token blocks.

Every reader is a generator: a file of any size is read line by line, and the first bad line
ends it with a `TraceError` that names the file, the line and what is wrong.
"""

from slotmirror.engine.traces.bailian import BailianRecord, read_bailian_records
from slotmirror.engine.traces.chat import Conversation, Message, read_conversations
from slotmirror.engine.traces.errors import TraceError
from slotmirror.engine.traces.mooncake import MooncakeRecord, read_mooncake_records
from slotmirror.engine.traces.reader import ReadOptions, detect_format, read_requests
from slotmirror.engine.traces.request import TraceFormat, TraceRequest

__all__ = [
    "BailianRecord",
    "Conversation",
    "Message",
    "MooncakeRecord",
    "ReadOptions",
    "TraceError",
    "TraceFormat",
    "TraceRequest",
    "detect_format",
    "read_bailian_records",
    "read_conversations",
    "read_mooncake_records",
    "read_requests",
]
