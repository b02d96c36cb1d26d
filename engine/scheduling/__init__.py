"""The parts of the scheduler: its queue, its plan of a step, its output, its encoder cache."""
