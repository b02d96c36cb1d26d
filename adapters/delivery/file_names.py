"""File names from request ids: any id, one safe name, no two ids alike."""

from __future__ import annotations

import hashlib
import string

SUFFIX = ".safetensors"
_PLAIN = frozenset(string.ascii_lowercase + string.digits + "-_")
_LENGTH_MAX = 180


def file_name(req_id: str) -> str:
    """A name without separators, dots or upper case, so that no id leaves the folder.

    Everything but `a-z 0-9 - _` is written as `=` and two hexadecimal digits per UTF-8 byte, so
    that ids which differ in case alone keep apart on file systems that ignore it. A long name is
    cut and ends in `~` and a digest.
    """
    encoded = "".join(
        chr(byte) if chr(byte) in _PLAIN else f"={byte:02x}"
        for byte in req_id.encode("utf-8", "surrogatepass")
    )
    if len(encoded) > _LENGTH_MAX:
        digest = hashlib.sha256(encoded.encode()).hexdigest()
        encoded = f"{encoded[: _LENGTH_MAX - len(digest) - 1]}~{digest}"
    return encoded + SUFFIX
