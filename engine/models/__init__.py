"""Stage models behind `base.StageModel`: integer fingerprints and a tiny transformer."""
