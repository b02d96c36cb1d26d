"""The schedule explorer: one seed decides who runs next, everywhere.

The engine's thread, the committer, the builders and the device's queues of a real manager run as
actors of one scheduler. Exactly one runs at a time; at every lock, wait, notification, fence,
backend call and thread start the scheduler picks who goes on. The same seed gives the same run,
so a failure found among a hundred thousand schedules is replayed by its number.
"""
