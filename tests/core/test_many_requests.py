"""Many live requests at once: more than the tables began with, twice over."""

from __future__ import annotations

from support.caches import Driver, firsts, rows

REQUESTS = 40


def test_L4_each_of_many_live_requests_has_a_delivered_position_of_its_own() -> None:
    """Request i gets i + 1 rows; after a preemption of all, its resume gives only its next row."""
    driver = Driver(num_blocks=1024, block_size=1)
    blocks: dict[str, list[int]] = {}
    taken = 0
    for number in range(REQUESTS):
        name, length = f"r{number}", number + 1
        blocks[name] = list(range(taken, taken + length + 1))
        taken += length + 1
        driver.run({name: (0, length)}, rows(0, length), new={name: (0, blocks[name])})
    driver.start({}, preempted=list(blocks))
    for number, name in enumerate(blocks):
        at = number + 1
        resumed = {name: (at, blocks[name])}
        out = driver.run({name: (at, 1)}, rows(100 + number, 1), resumed=resumed)
        assert out.spans[name] == (at, at + 1)
        assert out.hidden_states is not None
        assert firsts(out.hidden_states[name]) == [100 + number]
    driver.cache.shutdown()
