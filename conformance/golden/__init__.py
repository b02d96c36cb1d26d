"""Golden traces of the stage-output cache: what an engine said, and a hash of all it must get.

Recorded from the reference, inline `cpu_ref`, each trace proven by the plain dictionaries first;
shipped with the package, so that an operator can try a new machine, driver or backend against
them: `slotmirror golden check --backend NAME`.
"""
