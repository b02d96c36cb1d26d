"""Block hashes: prompts, appended outputs, extra keys, serialised bytes, start values."""

import pickle
import re
from collections.abc import Mapping

import cbor2
import torch

from slotmirror.engine.golden_replay.differences import ReplayReport
from slotmirror.engine.golden_replay.errors import VectorFileError, known
from slotmirror.engine.golden_replay.recording import Recorded, plain_keys
from slotmirror.kvcache.block_hashing import get_request_block_hasher
from slotmirror.kvcache.extra_keys import generate_block_hash_extra_keys
from slotmirror.kvcache.hash_functions import (
    HASH_FUNCTIONS,
    SEED_VARIABLE,
    KeyFormat,
    init_start_value,
)
from slotmirror.kvcache.request import LoRARequest, MultimodalFeature, Request

_TOKEN_RULE = re.compile(r"\(i\*(\d+)\+(\d+)\)%(\d+) for i in range\((\d+)\)")
_EMBEDS_RULE = re.compile(r"torch\.arange\(n\*d,float32\)\.reshape\(\[(\d+), (\d+)\]\)")


def replay_start_values(
    recorded: Mapping[str, Mapping[str, str]], key_format: KeyFormat, report: ReplayReport
) -> None:
    """`recorded` maps algorithm and seed to the start value in hex."""
    for algo, by_seed in recorded.items():
        known(HASH_FUNCTIONS, algo, "hash algorithm")
        for seed, expected in by_seed.items():
            actual = init_start_value(algo, key_format, {SEED_VARIABLE: seed}).hex()
            report.compare(f"none_hash/{algo}/{seed}", "value", expected, actual)


def replay_hash_vector(vector: Recorded, key_format: KeyFormat, report: ReplayReport) -> None:
    """One prompt, hashed at construction and after each of the appended outputs."""
    where = f"{key_format}/{vector['algo']}/{vector['name']}"
    request = _build_request(vector)
    size = vector["block_size"]
    hash_function = known(HASH_FUNCTIONS, vector["algo"], "hash algorithm")
    start_value = init_start_value(vector["algo"], key_format, {SEED_VARIABLE: vector["seed"]})
    request.attach_block_hasher(
        get_request_block_hasher(size, hash_function, start_value, key_format)
    )
    progress = [len(request.block_hashes)]
    for token_ids in vector.get("append") or ():
        request.append_output_token_ids(token_ids)
        progress.append(len(request.block_hashes))
    report.compare(where, "num_hashes_progress", vector["num_hashes_progress"], progress)

    hashes = [block_hash.hex() for block_hash in request.block_hashes]
    report.compare(
        where, "block_hashes", vector["block_hashes"], hashes, _exception(vector, key_format)
    )
    keys = [
        generate_block_hash_extra_keys(request, i * size, (i + 1) * size, key_format)
        for i in range(len(hashes))
    ]
    expected_keys = vector.get("extra_keys") or [None] * len(keys)
    report.compare(where, "extra_keys", expected_keys, plain_keys(keys))
    if vector.get("first_block_serialized_hex"):
        first = (start_value, tuple(request.all_token_ids[:size]), keys[0])
        report.compare(
            where,
            "first_block_serialized_hex",
            vector["first_block_serialized_hex"],
            _serialize(first, vector["algo"]).hex(),
        )
    report.num_hash_vectors += 1


def _exception(vector: Recorded, key_format: KeyFormat) -> str | None:
    """X6: in the tagged format equal strings hash equally, whichever objects they are, and the
    vectors with distinct objects are canonical; CBOR never looked at identity."""
    depends_on_identity = vector.get("identity") == "same" and "_cbor" not in vector["algo"]
    return "X6" if depends_on_identity and key_format is KeyFormat.TAGGED else None


def _build_request(vector: Recorded) -> Request:
    lora_name = vector.get("lora_name")
    return Request(
        vector["name"],
        _tokens(vector),
        prompt_embeds=_prompt_embeds(vector),
        lora_request=LoRARequest(lora_name, f"/adapters/{lora_name}") if lora_name else None,
        cache_salt=vector.get("cache_salt"),
        mm_features=_features(vector),
    )


def _tokens(vector: Recorded) -> list[int] | None:
    rule = vector.get("tokens_rule")
    if rule is None:
        tokens: list[int] | None = vector["tokens"]
        return tokens
    match = _TOKEN_RULE.fullmatch(rule)
    if match is None:
        raise VectorFileError(f"vector {vector['name']!r}: tokens_rule {rule!r} is not understood")
    factor, offset, modulus, count = map(int, match.groups())
    return [(i * factor + offset) % modulus for i in range(count)]


def _prompt_embeds(vector: Recorded) -> torch.Tensor | None:
    rule = vector.get("prompt_embeds")
    if rule is None:
        return None
    match = _EMBEDS_RULE.fullmatch(rule)
    if match is None:
        raise VectorFileError(
            f"vector {vector['name']!r}: prompt_embeds {rule!r} is not understood"
        )
    rows, width = map(int, match.groups())
    return torch.arange(rows * width, dtype=torch.float32).reshape(rows, width)


def _features(vector: Recorded) -> list[MultimodalFeature]:
    """With identity "same", equal identifiers are one object, else each is its own."""
    shared: dict[str, str] = {}
    features = []
    for identifier, offset, length in vector.get("mm_features") or ():
        own = (
            shared.setdefault(identifier, identifier)
            if vector["identity"] == "same"
            else ("".join(list(identifier)))
        )
        features.append(MultimodalFeature(own, offset, length))
    return features


def _serialize(value: object, algo: str) -> bytes:
    if algo.endswith("_cbor"):
        return cbor2.dumps(value, canonical=True)
    return pickle.dumps(value, protocol=5)
