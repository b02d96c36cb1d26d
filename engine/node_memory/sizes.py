"""Sizes as people write them for containers."""

import re

from slotmirror.core.errors import ConfigError

_SIZE = re.compile(r"(\d+)\s*(?:([kmgt])(?:i(?:b)?)?|b)?", re.ASCII | re.IGNORECASE)
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_RULE = "must be a whole number of bytes or of binary units, such as 256GiB, 256g or 512m"


def parse_size(setting: str, text: str) -> int:
    """Bytes: plain, or in binary units as Docker (`256g`) and Kubernetes (`256Gi`) write them.

    `256GB` is refused: some mean 2³⁰ by it and some 10⁹.

    Raises:
        ConfigError: the text has another form, or is 0.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ConfigError(setting, text, _RULE)
    unit = (found[2] or "").lower()
    return int(found[1]) << (10 * _POWER.get(unit, 0))
