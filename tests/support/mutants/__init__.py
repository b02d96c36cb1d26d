"""Historical bugs of stage-output caches, put back into this one for a test.

Each mutant is a small patch of ours. The quiet trace, in which nothing overlaps, must not notice
it; the explorer must catch it, by wrong bytes or a broken invariant.
"""
