"""The real vLLM's KV-cache manager and scheduler beside ours: equal operations, then times."""
