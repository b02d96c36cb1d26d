"""Figures as people read them."""

GIB = 2**30
MB = 10**6


def gib(num_bytes: int) -> str:
    """Binary gibibytes, two decimals."""
    return f"{num_bytes / GIB:.2f} GiB"


def binary(num_bytes: int) -> str:
    """In the largest binary unit of which it has at least one, two decimals."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >> power:
            return f"{num_bytes / (1 << power):.2f} {unit}"
    return f"{num_bytes} B"


def mb(num_bytes: int) -> str:
    """Decimal megabytes, one decimal."""
    return f"{num_bytes / MB:.1f} MB"


def count(number: int) -> str:
    """A whole number with its thousands apart."""
    return f"{number:,}"


def percent(share: float) -> str:
    """A share of one in percent, two decimals."""
    return f"{share:.2%}"


def seconds(duration_s: float) -> str:
    """A duration, two decimals."""
    return f"{duration_s:.2f} s"


def spoken(memory_class: str) -> str:
    """`hit_output_bytes` as a person says it."""
    return memory_class.removesuffix("_bytes").replace("_", " ")
