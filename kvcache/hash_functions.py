"""The four block-hash algorithms and the start value of a hash chain (seed 2; spec kv 1.1, 1.2).

An algorithm is a serialisation (pickle protocol 5 or canonical CBOR) followed by a digest
(SHA-256: 32 bytes, XXH3-128: 16 bytes). Functions only: no state, usable from any thread.
"""

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from enum import StrEnum

import cbor2

BlockHash = bytes
HashFunction = Callable[[object], bytes]

_log = logging.getLogger(__name__)

SEED_VARIABLE = "PYTHONHASHSEED"
_DETERMINISTIC_SEED = "vllm-none-hash"
_RANDOM_START_BYTES = 32


class KeyFormat(StrEnum):
    """How the parts of a block's identity that are not tokens enter its hash.

    `TAGGED` is the form of vLLM 0.32: every part carries its kind, so an adapter name can never
    equal a salt (public issue 44701). `V0_25` is the untagged form of vLLM 0.25.1, byte for byte.
    """

    TAGGED = "tagged"
    V0_25 = "v0_25"


def sha256(value: object) -> bytes:
    """SHA-256 of the pickled value: 32 bytes."""
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def sha256_cbor(value: object) -> bytes:
    """SHA-256 of the value in canonical CBOR: 32 bytes, reproducible outside Python."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def xxhash(value: object) -> bytes:
    """XXH3-128 of the pickled value: 16 bytes. Not cryptographic: see `get_hash_function`."""
    return load_xxh3_128_digest()(pickle.dumps(value, protocol=5))


def xxhash_cbor(value: object) -> bytes:
    """XXH3-128 of the value in canonical CBOR: 16 bytes. Not cryptographic."""
    return load_xxh3_128_digest()(cbor2.dumps(value, canonical=True))


def load_xxh3_128_digest() -> Callable[[bytes], BlockHash]:
    """XXH3-128 of raw bytes. Raises ModuleNotFoundError where xxhash is not installed."""
    try:
        from xxhash import xxh3_128_digest
    except ImportError as cause:
        raise ModuleNotFoundError(
            "the xxhash block-hash algorithms need the xxhash package: "
            "install it with `pip install 'slotmirror[xxhash]'`, "
            "or set prefix_caching_hash_algo to sha256"
        ) from cause
    digest: Callable[[bytes], BlockHash] = xxh3_128_digest
    return digest


HASH_FUNCTIONS: Mapping[str, HashFunction] = {
    "sha256": sha256,
    "sha256_cbor": sha256_cbor,
    "xxhash": xxhash,
    "xxhash_cbor": xxhash_cbor,
}


def get_hash_function(prefix_caching_hash_algo: str) -> HashFunction:
    """The hash function of this name. Raises ValueError for an unknown one.

    The xxhash algorithms log a warning: their collisions can be constructed, so tenants that do
    not trust each other could read each other's cached prefixes (seed 2, limits).
    """
    try:
        function = HASH_FUNCTIONS[prefix_caching_hash_algo]
    except KeyError:
        raise ValueError(
            f"prefix_caching_hash_algo must be one of {', '.join(HASH_FUNCTIONS)}, "
            f"not {prefix_caching_hash_algo!r}"
        ) from None
    if prefix_caching_hash_algo.startswith("xxhash"):
        _log.warning(
            "prefix_caching_hash_algo=%s is not collision resistant: use sha256 where tenants "
            "that do not trust each other share the cache",
            prefix_caching_hash_algo,
        )
    return function


def init_start_value(
    prefix_caching_hash_algo: str,
    key_format: KeyFormat = KeyFormat.TAGGED,
    environment: Mapping[str, str] | None = None,
) -> BlockHash:
    """The parent of every first block, chosen once per engine process (spec kv 1.2).

    With PYTHONHASHSEED set, the hash of that string: processes that set the same one share
    hashes. Unset, it is 32 random bytes in format `V0_25`; in format `TAGGED` the hash of a fixed
    string for the sha256 algorithms, and of a random one for xxhash, whose predictable chains
    would make collisions easier to construct (public issue 54727).
    """
    function = HASH_FUNCTIONS[prefix_caching_hash_algo]
    seed = (os.environ if environment is None else environment).get(SEED_VARIABLE)
    if seed is not None:
        return function(seed)
    if key_format is KeyFormat.TAGGED and function in (sha256, sha256_cbor):
        return function(_DETERMINISTIC_SEED)
    if function in (sha256_cbor, xxhash_cbor):
        _log.warning(
            "%s is not set, so no other process can reproduce these %s block hashes",
            SEED_VARIABLE,
            prefix_caching_hash_algo,
        )
    random_bytes = os.urandom(_RANDOM_START_BYTES)
    if key_format is KeyFormat.V0_25:
        return random_bytes
    return function(random_bytes.hex())
