"""A trace as capacity planning sees it: hashes of blocks, without tokens for a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slotmirror.engine.traces import (
    BailianRecord,
    MooncakeRecord,
    ReadOptions,
    TraceRequest,
    read_bailian_records,
    read_mooncake_records,
    read_requests,
)
from slotmirror.engine.traces.bailian import BAILIAN_BLOCK_TOKENS
from slotmirror.engine.traces.block_fields import HASH_ID_BYTES
from slotmirror.engine.traces.mooncake import MOONCAKE_BLOCK_TOKENS
from slotmirror.kvcache.block_hashing import hash_block_tokens
from slotmirror.kvcache.hash_functions import BlockHash, get_hash_function, init_start_value

_HASH_ALGORITHM = "sha256"
_BAILIAN_START = BlockHash(b"bailian")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request in blocks.

    Attributes:
        request_id: unique in its file.
        num_tokens: tokens of the prompt.
        output_tokens: tokens that are generated after it.
        block_hashes: of the prompt's whole blocks; equal hashes mean equal prefixes.
        tail_hash: of the partial last block; None when the prompt ends with a whole one.
    """

    request_id: str
    num_tokens: int
    output_tokens: int
    block_hashes: tuple[BlockHash, ...]
    tail_hash: BlockHash | None

    @property
    def all_hashes(self) -> tuple[BlockHash, ...]:
        """The whole blocks' hashes, and the tail's if there is one."""
        return self.block_hashes if self.tail_hash is None else (*self.block_hashes, self.tail_hash)


def planned_mooncake_requests(path: Path) -> Iterator[PlannedRequest]:
    """The requests of a Mooncake trace in the file's own blocks and lengths.

    Raises:
        TraceError: the file or one of its lines is unusable.
    """
    return map(_from_record, read_mooncake_records(path))


def planned_bailian_requests(path: Path) -> Iterator[PlannedRequest]:
    """The requests of a Bailian trace in the file's own blocks and lengths.

    Raises:
        TraceError: the file or one of its lines is unusable.
    """
    return map(_from_bailian_record, read_bailian_records(path))


def planned_chat_requests(
    path: Path, options: ReadOptions, block_size: int
) -> Iterator[PlannedRequest]:
    """The requests of a chat file in blocks of `block_size` tokens, hashed as the engine does.

    Raises:
        TraceError: the file or one of its lines is unusable.
    """
    return map(_token_planner(block_size), read_requests(path, options))


def _from_record(record: MooncakeRecord) -> PlannedRequest:
    hashes = tuple(BlockHash(i.to_bytes(HASH_ID_BYTES, "big")) for i in record.hash_ids)
    num_whole = record.input_length // MOONCAKE_BLOCK_TOKENS
    return PlannedRequest(
        request_id=f"line{record.line}",
        num_tokens=record.input_length,
        output_tokens=max(record.output_length, 1),
        block_hashes=hashes[:num_whole],
        tail_hash=hashes[num_whole] if num_whole < len(hashes) else None,
    )


def _from_bailian_record(record: BailianRecord) -> PlannedRequest:
    """Ids name the tokens of their block alone: they are chained, as an engine would."""
    hash_function = get_hash_function(_HASH_ALGORITHM)
    parent, hashes = _BAILIAN_START, []
    for hash_id in record.hash_ids:
        parent = hash_block_tokens(hash_function, parent, (hash_id,))
        hashes.append(parent)
    num_whole = record.input_length // BAILIAN_BLOCK_TOKENS
    return PlannedRequest(
        request_id=record.request_id,
        num_tokens=record.input_length,
        output_tokens=max(record.output_length, 1),
        block_hashes=tuple(hashes[:num_whole]),
        tail_hash=hashes[num_whole] if num_whole < len(hashes) else None,
    )


def _token_planner(block_size: int) -> Callable[[TraceRequest], PlannedRequest]:
    hash_function = get_hash_function(_HASH_ALGORITHM)
    start_value = init_start_value(_HASH_ALGORITHM)

    def planned(request: TraceRequest) -> PlannedRequest:
        tokens = request.prompt_token_ids
        hashes = []
        parent = start_value
        for start in range(0, len(tokens), block_size):
            parent = hash_block_tokens(hash_function, parent, tokens[start : start + block_size])
            hashes.append(parent)
        num_whole = len(tokens) // block_size
        return PlannedRequest(
            request_id=request.request_id,
            num_tokens=len(tokens),
            output_tokens=request.output_tokens_max,
            block_hashes=tuple(hashes[:num_whole]),
            tail_hash=hashes[num_whole] if num_whole < len(hashes) else None,
        )

    return planned
