"""Planning: three rates computed by hand, the pool of fixed size, and the real trace."""

from pathlib import Path

import pytest

from slotmirror.core.errors import ConfigError
from slotmirror.engine.planning import PlanOptions, plan_capacity, plan_trace
from slotmirror.engine.planning.plan import round_sizes
from slotmirror.engine.traces import ReadOptions, TraceFormat
from support.real_trace import real_trace
from support.trace_files import block_request, chat, write_json_lines


def write_trace(path: Path, *requests: tuple[int, int, list[int]]) -> Path:
    """Records from (input length, output length, ids)."""
    return write_json_lines(path, [block_request(*request) for request in requests])


def write_chat(path: Path, *texts: str) -> Path:
    """Conversations of one user message."""
    return write_json_lines(path, [chat(("user", text)) for text in texts])


def test_three_rates_of_a_trace_computed_by_hand(tmp_path: Path) -> None:
    """Partial blocks hit in the first two rates only, and the last token only in those.

    Request 1 has two whole blocks and a part of 100; request 2 is the same: 3 of 3 ids hit,
    capped at 1124 tokens, and for the engine two blocks. Request 3 is the two whole blocks alone:
    2 of 2 ids, but the engine computes the second block for its last token. Request 4 shares the
    first block: 1 of 2 ids. Prompt tokens: 1124 + 1124 + 1024 + 700 = 3972; ids: 3 + 3 + 2 + 2.
    """
    path = write_trace(
        tmp_path / "t.jsonl",
        (1124, 1, [0, 1, 2]),
        (1124, 1, [0, 1, 2]),
        (1024, 1, [0, 1]),
        (700, 1, [0, 9]),
    )
    plan = plan_trace(path, PlanOptions())
    rates = plan.rates
    assert plan.format is TraceFormat.MOONCAKE
    assert (rates.requests, rates.prompt_tokens, rates.blocks) == (4, 3972, 10)
    assert rates.token_rate == (1124 + 1024 + 512) / 3972
    assert rates.block_rate == 6 / 10
    assert rates.engine_rate == (1024 + 512 + 512) / 3972
    assert rates.distinct_blocks == 2
    assert plan.pools == ()


def test_a_hit_ends_at_the_first_unknown_block(tmp_path: Path) -> None:
    """Known ids behind an unknown one do not count: a prefix has no gaps."""
    path = write_trace(tmp_path / "t.jsonl", (1536, 1, [0, 1, 2]), (1536, 1, [0, 7, 2]))
    assert plan_trace(path, PlanOptions()).rates.hit_blocks == 1


def test_a_large_pool_hits_what_endless_memory_hits(tmp_path: Path) -> None:
    """Without evictions the pool's rate is the engine rate."""
    path = write_trace(tmp_path / "t.jsonl", (1124, 9, [0, 1, 2]), (1124, 9, [0, 1, 5]))
    plan = plan_trace(path, PlanOptions(pool_sizes=(7,)))
    assert plan.pools[0].evictions == 0
    assert plan.rate_of(plan.pools[0]) == plan.rates.engine_rate == 1024 / 2248


def test_a_small_pool_evicts_the_tail_of_the_oldest_prompt_first(tmp_path: Path) -> None:
    """Four usable blocks, worked out step by step.

    The second prompt (7, 8) takes the free block and evicts 2, the tail of the first prompt; so
    the repeat of the first hits 0 and 1, the two blocks that it may hit, and evicts 8, the tail of
    the second for its own last block. The last prompt finds 7 alone, and evicts 2 and 1.
    """
    path = write_trace(
        tmp_path / "t.jsonl",
        (1536, 1, [0, 1, 2]),
        (1024, 1, [7, 8]),
        (1536, 1, [0, 1, 2]),
        (1025, 1, [7, 8, 9]),
    )
    plan = plan_trace(path, PlanOptions(pool_sizes=(5,)))
    assert plan.pools[0].hit_tokens == (2 + 1) * 512
    assert plan.rates.engine_hit_tokens == (2 + 2) * 512
    assert plan.pools[0].evictions == 1 + 1 + 2


def test_generated_tokens_take_blocks(tmp_path: Path) -> None:
    """A long answer pushes another prompt out; its last token is never computed on."""
    short = [(1025, 1, [0, 1, 2]), (512, 1, [7]), (1025, 1, [0, 1, 2])]
    long = [short[0], (512, 1 + 3 * 512, [7]), short[2]]
    hits = []
    for name, requests in (("short", short), ("long", long)):
        path = write_trace(tmp_path / name, *requests)
        plan = plan_trace(path, PlanOptions(pool_sizes=(5,)))
        hits.append(plan.pools[0].hit_tokens)
    assert hits == [1024, 0]


def test_a_request_that_never_fits_is_counted_and_passed_over(tmp_path: Path) -> None:
    """It takes no block and costs the others nothing."""
    path = write_trace(
        tmp_path / "t.jsonl", (600, 1, [0, 1]), (1537, 1, [0, 1, 2, 3]), (600, 1, [0, 1])
    )
    plan = plan_trace(path, PlanOptions(pool_sizes=(3,)))
    assert plan.pools[0].requests_too_long == 1
    assert plan.pools[0].hit_tokens == 512


def test_chat_is_planned_in_blocks_of_the_given_size(tmp_path: Path) -> None:
    """Two prompts of 43 tokens that share 41 before the closing markers differ in block 3 of 16.

    A prompt is one begin token, a role marker, the text and two markers.
    """
    path = write_chat(tmp_path / "c.jsonl", "x" * 38 + "a", "x" * 38 + "b", "x" * 38 + "a")
    plan = plan_trace(path, PlanOptions(block_size=16))
    assert plan.rates.prompt_tokens == 3 * 43
    assert plan.rates.engine_hit_tokens == 2 * 32
    assert plan.rates.hit_tokens == 32 + 43
    finer = plan_trace(path, PlanOptions(block_size=8, pool_sizes=(100,)))
    assert finer.rates.engine_hit_tokens == 2 * 40
    assert finer.pools[0].hit_tokens == 2 * 40


def test_several_pools_at_once_are_what_each_is_alone(tmp_path: Path) -> None:
    """Pools of one run do not know of each other."""
    path = write_trace(tmp_path / "t.jsonl", *[(1024, 3, [i % 4, 10 + i % 3]) for i in range(30)])
    together = plan_trace(path, PlanOptions(pool_sizes=(4, 9))).pools
    alone = [plan_trace(path, PlanOptions(pool_sizes=(size,))).pools[0] for size in (4, 9)]
    assert [(p.num_blocks, p.hit_tokens, p.evictions) for p in together] == [
        (p.num_blocks, p.hit_tokens, p.evictions) for p in alone
    ]
    assert together[0].hit_tokens < together[1].hit_tokens


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [
        (0, (2,)),
        (3, (2, 5)),
        (100, (2, 5, 10, 20, 50, 100)),
        (170_899, (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)),
    ],
)
def test_round_sizes_span_what_a_trace_needs(num_blocks: int, sizes: tuple[int, ...]) -> None:
    """From a five-hundredth of the blocks to the first round number that holds them all."""
    assert round_sizes(num_blocks) == sizes


def test_capacity_chooses_sizes_unless_they_are_given(tmp_path: Path) -> None:
    """The trace's distinct blocks decide; given sizes are kept."""
    path = write_trace(tmp_path / "t.jsonl", (1536, 1, [0, 1, 2]), (1536, 1, [7, 8, 9]))
    chosen = plan_capacity(path, PlanOptions())
    assert [pool.num_blocks for pool in chosen.pools] == [2, 5, 10]
    given = plan_capacity(path, PlanOptions(pool_sizes=(6,)))
    assert [pool.num_blocks for pool in given.pools] == [6]


def test_limit_bounds_the_requests(tmp_path: Path) -> None:
    """Only the first requests are planned."""
    path = write_trace(tmp_path / "t.jsonl", (1, 1, [0]), (1, 1, [0]), (1, 1, [0]))
    assert plan_trace(path, PlanOptions(read=ReadOptions(limit=2))).rates.requests == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(pool_sizes=(1,)), "num_blocks=1: must be at least 2: block 0 is never used"),
        (
            PlanOptions(block_size=16),
            "block_size=16: planning uses the trace's own blocks of 512 tokens",
        ),
        (
            PlanOptions(read=ReadOptions(scale=2)),
            "scale=2: planning keeps the trace's lengths",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, options: PlanOptions, message: str
) -> None:
    """The error names the setting and its value."""
    path = write_trace(tmp_path / "t.jsonl", (1, 1, [0]))
    with pytest.raises(ConfigError) as caught:
        plan_trace(path, options)
    assert str(caught.value) == message


def test_chat_blocks_must_have_tokens(tmp_path: Path) -> None:
    """A block of no tokens is refused."""
    path = write_chat(tmp_path / "c.jsonl", "x")
    with pytest.raises(ConfigError, match="block_size=0: must be at least 1"):
        plan_trace(path, PlanOptions(block_size=0))


def test_rates_of_the_real_trace() -> None:
    """12,031 requests: the published trace's token, block and engine rate."""
    plan = plan_trace(real_trace(), PlanOptions(pool_sizes=(400_000,)))
    rates = plan.rates
    assert rates.requests == 12_031
    assert f"{rates.token_rate:.2%}" == "37.36%"
    assert f"{rates.block_rate:.2%}" == "36.64%"
    assert f"{rates.engine_rate:.2%}" == "37.34%"
    assert plan.rate_of(plan.pools[0]) == rates.engine_rate
    assert plan.pools[0].evictions == 0


def test_a_pool_smaller_than_the_real_trace_hits_less() -> None:
    """More blocks never hit less here, and all of them stay below the rate without evictions."""
    sizes = (1_000, 10_000, 100_000)
    plan = plan_trace(real_trace(), PlanOptions(pool_sizes=sizes))
    hits = [pool.hit_tokens for pool in plan.pools]
    assert min(pool.evictions for pool in plan.pools) > 0
    assert 0 < hits[0] < hits[1] < hits[2] < plan.rates.engine_hit_tokens
