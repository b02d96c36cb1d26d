"""A developer's tool: small changes to a module of the core, and whether the tests notice.

`PYTHONPATH=tests python -m mutation --module core/merge.py --sample 30 --seed 1 --jobs 2`. Each
change is made in a copy of the repository; what survives is a rule without a test, a line without
a use, or a change that means the same.
"""
