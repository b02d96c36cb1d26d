"""What an engine may do, as data: traces drawn from a seed, and the dictionaries that check them.

A `Trace` is a list of steps: events for the cache, and what the stage computed. `PlainModel`
follows the same steps with dictionaries and knows what every consumer must get.
"""
