"""Hit rate against capacity as a picture: one SVG file that any browser shows."""

from math import ceil, log10
from xml.sax.saxutils import escape

from slotmirror.cli.units import count, percent
from slotmirror.engine.planning import TracePlan

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 50, 60
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_RATE_STEPS = 5


def capacity_svg(name: str, plan: TracePlan) -> str:
    """The plan's pools as a curve: capacity in blocks, logarithmic, and the engine rate; a dashed
    line is the rate with endless memory."""
    curve = _Curve(plan)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        '<g font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, _TOP - 20, f"{name}: hit rate against capacity", size=15),
        *curve.rate_lines(),
        *curve.size_labels(),
        _text(
            _LEFT + _PLOT_WIDTH / 2,
            _HEIGHT - 12,
            f"KV blocks of {plan.rates.block_size} tokens",
            anchor="middle",
        ),
        *curve.limit_line(),
        *curve.line(),
        "</g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Curve:
    """Where the points lie on the page."""

    def __init__(self, plan: TracePlan) -> None:
        pools = sorted(plan.pools, key=lambda pool: pool.num_blocks)
        self._points = [(pool.num_blocks, plan.rate_of(pool)) for pool in pools]
        self._limit = plan.rates.engine_rate
        self._first = log10(self._points[0][0])
        self._span = log10(self._points[-1][0]) - self._first
        # The axis ends with the next ten percent.
        self._step = max(ceil(self._limit * 10), 1) / 10 / _RATE_STEPS

    def x(self, num_blocks: int) -> float:
        share = (log10(num_blocks) - self._first) / self._span if self._span else 0.5
        return round(_LEFT + share * _PLOT_WIDTH, 1)

    def y(self, rate: float) -> float:
        return round(_TOP + _PLOT_HEIGHT * (1 - rate / (self._step * _RATE_STEPS)), 1)

    def rate_lines(self) -> list[str]:
        lines = []
        for i in range(_RATE_STEPS + 1):
            rate = i * self._step
            y = self.y(rate)
            lines.append(_line(_LEFT, y, _LEFT + _PLOT_WIDTH, y, "#ddd"))
            lines.append(_text(_LEFT - 8, y + 4, f"{rate:.0%}", anchor="end"))
        return lines

    def size_labels(self) -> list[str]:
        bottom = _TOP + _PLOT_HEIGHT
        return [
            _text(self.x(num_blocks), bottom + 18, count(num_blocks), anchor="middle", size=10)
            for num_blocks, _ in self._points
        ]

    def limit_line(self) -> list[str]:
        y = self.y(self._limit)
        label = f"endless: {percent(self._limit)}"
        return [
            _line(_LEFT, y, _LEFT + _PLOT_WIDTH, y, "#c60", dashes="6 4"),
            _text(_LEFT + 6, y - 5, label),
        ]

    def line(self) -> list[str]:
        places = [(self.x(num_blocks), self.y(rate)) for num_blocks, rate in self._points]
        path = " ".join(f"{x},{y}" for x, y in places)
        dots = [
            f'<circle cx="{x}" cy="{y}" r="3.5" fill="#06c">'
            f"<title>{count(num_blocks)} blocks: {percent(rate)}</title></circle>"
            for (x, y), (num_blocks, rate) in zip(places, self._points, strict=True)
        ]
        return [f'<polyline points="{path}" fill="none" stroke="#06c" stroke-width="2"/>', *dots]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="#333">'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none") -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" '
        f'stroke-dasharray="{dashes}"/>'
    )
