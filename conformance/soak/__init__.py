"""The soak: one cache after the other on real threads, for as long as a person cares to watch.

The same engines, builders and plain model as the explorer's, without its scheduler: what the
operating system's threads do is not replayed, but it is real. Between rounds everything comes to
rest and is measured; a soak must be right and flat.
"""
