"""Published implementations that the benchmarks run beside ours, fetched, never copied."""
