"""Algorithms by name, their digests, and the start value of a chain (spec kv 1.1, 1.2)."""

import hashlib
import logging
import pickle
import subprocess
import sys

import cbor2
import pytest

from slotmirror.kvcache.hash_functions import (
    HASH_FUNCTIONS,
    KeyFormat,
    get_hash_function,
    init_start_value,
    xxhash,
)

BLOCK = (b"\x01" * 32, (1, 2, 3, 70_000), None)
DIGEST_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}


@pytest.mark.parametrize(("algo", "num_bytes"), DIGEST_BYTES.items())
def test_digest_length(algo, num_bytes):
    """sha256* give 32 bytes, xxhash* 16."""
    assert len(get_hash_function(algo)(BLOCK)) == num_bytes


def test_serialisation_is_pickle_5_or_canonical_cbor():
    """The digest covers exactly the bytes of pickle protocol 5, or of canonical CBOR."""
    pickled, encoded = pickle.dumps(BLOCK, protocol=5), cbor2.dumps(BLOCK, canonical=True)
    assert HASH_FUNCTIONS["sha256"](BLOCK) == hashlib.sha256(pickled).digest()
    assert HASH_FUNCTIONS["sha256_cbor"](BLOCK) == hashlib.sha256(encoded).digest()


def test_unknown_algorithm_is_named_with_the_setting():
    """An unknown name raises a ValueError that names it, the setting and the choices."""
    with pytest.raises(ValueError, match=r"prefix_caching_hash_algo.*sha256_cbor.*not 'md5'"):
        get_hash_function("md5")


def test_missing_xxhash_says_how_to_install_it(monkeypatch):
    """Without the xxhash package the first use raises, and says what to install or set."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    function = get_hash_function("xxhash")
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*xxhash.*sha256"):
        function(BLOCK)


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor"])
def test_issue_29163_xxhash_warns_about_shared_tenants(algo, caplog):
    """Choosing xxhash logs that tenants who share the cache are at risk; sha256 logs nothing."""
    get_hash_function("sha256")
    assert not caplog.records
    get_hash_function(algo)
    assert "tenants" in caplog.text


@pytest.mark.parametrize("key_format", KeyFormat)
@pytest.mark.parametrize("algo", HASH_FUNCTIONS)
def test_issue_51875_same_seed_same_start_value(algo, key_format):
    """With PYTHONHASHSEED set, the start value is the hash of its text in both formats."""
    start_value = init_start_value(algo, key_format, {"PYTHONHASHSEED": "0"})
    assert start_value == HASH_FUNCTIONS[algo]("0")


def test_issue_51875_two_processes_share_hashes():
    """Two processes with one PYTHONHASHSEED have one start value, read when it is made."""
    code = (
        "from slotmirror.kvcache.hash_functions import init_start_value as f;"
        "print(f('sha256_cbor').hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("42", "42", "43")
    }
    assert len(outputs) == 2


@pytest.mark.parametrize("algo", ["sha256", "sha256_cbor"])
def test_issue_29163_unset_seed_tagged_sha256_is_deterministic(algo):
    """Unset, the tagged format starts sha256 chains from the hash of a fixed string."""
    start_value = init_start_value(algo, KeyFormat.TAGGED, {})
    assert start_value == HASH_FUNCTIONS[algo]("vllm-none-hash")


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor"])
def test_issue_54727_unset_seed_tagged_xxhash_is_random(algo):
    """Unset, xxhash chains start from 16 bytes that differ each time."""
    first, second = (init_start_value(algo, KeyFormat.TAGGED, {}) for _ in range(2))
    assert len(first) == 16
    assert first != second


@pytest.mark.parametrize("algo", HASH_FUNCTIONS)
def test_unset_seed_v0_25_is_32_random_bytes(algo):
    """Unset, 0.25.1 starts every chain, also of xxhash, from 32 random bytes."""
    first, second = (init_start_value(algo, KeyFormat.V0_25, {}) for _ in range(2))
    assert len(first) == 32
    assert first != second


@pytest.mark.parametrize(
    ("algo", "key_format", "environment", "warns"),
    [
        ("sha256_cbor", KeyFormat.V0_25, {}, True),
        ("xxhash_cbor", KeyFormat.TAGGED, {}, True),
        ("sha256_cbor", KeyFormat.TAGGED, {}, False),
        ("sha256", KeyFormat.V0_25, {}, False),
        ("sha256_cbor", KeyFormat.V0_25, {"PYTHONHASHSEED": "1"}, False),
    ],
)
def test_random_start_value_of_cbor_warns(algo, key_format, environment, warns, caplog):
    """Only a CBOR algorithm with a random start value warns: it was chosen to be reproducible."""
    with caplog.at_level(logging.WARNING):
        init_start_value(algo, key_format, environment)
    assert ("PYTHONHASHSEED" in caplog.text) is warns


def test_xxhash_is_xxh3_128():
    """The digest is XXH3-128 of the pickled bytes."""
    library = pytest.importorskip("xxhash", reason="the optional xxhash package is not installed")
    assert xxhash(BLOCK) == library.xxh3_128_digest(pickle.dumps(BLOCK, protocol=5))
