"""Which of a model's outputs are kept, and how (K4)."""

from __future__ import annotations

from dataclasses import dataclass

from slotmirror.core.errors import ConfigError
from slotmirror.core.key_spec import HIDDEN_KEY


@dataclass(frozen=True, slots=True)
class ModelCachePolicy:
    """What one stage's model needs of the cache; immutable, registered once.

    needs_full_hidden_states     hidden rows are kept, and a hit without them is an error (D5)
    deferred_keys                written once when their request ends (`JOIN_ON_FINISH`, W2)
    leftover_keys                never cached, although their first dimension counts tokens (D7)
    mm_outputs_written_in_sample the model fills them while sampling; save after it (D10)
    """

    needs_full_hidden_states: bool = True
    deferred_keys: frozenset[str] = frozenset()
    leftover_keys: frozenset[str] = frozenset()
    mm_outputs_written_in_sample: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "deferred_keys", frozenset(self.deferred_keys))
        object.__setattr__(self, "leftover_keys", frozenset(self.leftover_keys))
        both = self.deferred_keys & self.leftover_keys
        if both:
            raise ConfigError("leftover_keys", sorted(both), "also named in deferred_keys")
        if HIDDEN_KEY in self.deferred_keys | self.leftover_keys:
            rule = "hidden states are immediate; opt out with needs_full_hidden_states=False"
            raise ConfigError("deferred_keys", HIDDEN_KEY, rule)
        if self.needs_full_hidden_states and self.mm_outputs_written_in_sample:
            rule = "hidden rows must be saved before sampling; set needs_full_hidden_states=False"
            raise ConfigError("mm_outputs_written_in_sample", True, rule)

    @classmethod
    def from_model(cls, model: object) -> ModelCachePolicy:
        """Read the three attributes by which models state their needs; each has a default.

        `requires_full_prefix_cached_hidden_states` (True), `deferred_prefix_cache_mm_keys` (none),
        `mm_outputs_written_in_sample` (False).
        """
        hidden = bool(getattr(model, "requires_full_prefix_cached_hidden_states", True))
        deferred = frozenset(getattr(model, "deferred_prefix_cache_mm_keys", None) or ())
        in_sample = bool(getattr(model, "mm_outputs_written_in_sample", False))
        return cls(hidden, deferred, mm_outputs_written_in_sample=in_sample)
