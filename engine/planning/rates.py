"""How much of a trace could be a prefix hit if no block were ever evicted."""

from dataclasses import dataclass, field

from slotmirror.engine.planning.requests import PlannedRequest
from slotmirror.kvcache.hash_functions import BlockHash


@dataclass(slots=True)
class TraceRates:
    """Hits of a whole trace with endless memory, counted in three ways.

    A hit is a run of known hashes from the prompt's first block on. The three rates differ in
    what may hit and what is counted:

    * `token_rate`: tokens of the known blocks, the partial last one among them, over all prompt
      tokens;
    * `block_rate`: known blocks, the partial one counting as one, over all blocks;
    * `engine_rate`: what a paged engine can do: whole blocks alone are known, and the last token
      of a prompt is always computed; tokens over tokens.
    """

    block_size: int
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    blocks: int = 0
    hit_tokens: int = 0
    hit_blocks: int = 0
    engine_hit_tokens: int = 0
    _known: set[BlockHash] = field(default_factory=set, init=False, repr=False)
    _known_whole: set[BlockHash] = field(default_factory=set, init=False, repr=False)

    def add(self, request: PlannedRequest) -> None:
        """Count one request, then make its blocks known."""
        hashes = request.all_hashes
        hit_blocks = _leading(hashes, self._known)
        reusable = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        self.requests += 1
        self.prompt_tokens += request.num_tokens
        self.output_tokens += request.output_tokens
        self.blocks += len(hashes)
        self.hit_blocks += hit_blocks
        self.hit_tokens += min(hit_blocks * self.block_size, request.num_tokens)
        self.engine_hit_tokens += _leading(reusable, self._known_whole) * self.block_size
        self._known.update(hashes)
        self._known_whole.update(request.block_hashes)

    @property
    def distinct_blocks(self) -> int:
        """Whole blocks of the trace's prompts, each counted once: what caching them all takes."""
        return len(self._known_whole)

    @property
    def token_rate(self) -> float:
        """Tokens of known blocks over prompt tokens."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def block_rate(self) -> float:
        """Known blocks over blocks."""
        return self.hit_blocks / self.blocks

    @property
    def engine_rate(self) -> float:
        """Tokens that an engine need not compute over prompt tokens."""
        return self.engine_hit_tokens / self.prompt_tokens


def _leading(hashes: tuple[BlockHash, ...], known: set[BlockHash]) -> int:
    """Number of hashes before the first unknown one."""
    for count, block_hash in enumerate(hashes):
        if block_hash not in known:
            return count
    return len(hashes)
