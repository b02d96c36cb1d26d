"""A step to fail in, and the fault that it meets."""

from __future__ import annotations

from support.caches import Driver, rows


def begun(driver: Driver, name: str = "a", block: int = 0) -> int:
    driver.start({name: (0, 4)}, new={name: (0, (block,))})
    return driver.save(rows(0, 4))


def broken(driver: Driver, member: str, error: Exception) -> None:
    """Let a member of the driver's backend raise from now on."""

    def fail(*_: object, **__: object) -> None:
        raise error

    setattr(driver.backend, member, fail)
