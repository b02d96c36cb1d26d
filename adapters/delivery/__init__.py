"""From a stage's steps to whole requests: assembly by position, sinks, the threads between."""
