"""KV events on the wire: msgpack batches, a ZeroMQ publisher with replay, and its subscriber.

Needs the extra `slotmirror[events]`; nothing else in the KV cache does.
"""
