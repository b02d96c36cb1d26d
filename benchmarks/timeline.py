"""One step as a picture: a self-contained SVG with a lane per thread and a box per timed call."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parts import Span

_WIDTH = 1280
_LEFT = 90
_ROW = 22
_GAP = 16
_TOP = 46
_CHAR = 6.2
_COLOURS = ("#7fb3d5", "#f5b041", "#82c99d", "#e59a8f", "#b8a1d9", "#d3c36e", "#8fd3d1", "#e0a3c8")


def draw(title: str, spans: Sequence[Span], lanes: dict[int, str]) -> str:
    """The calls of one step, as SVG text; `lanes` names the threads, top to bottom.

    Boxes below a box are calls that it made. Widths are wall time; hovering shows figures.
    """
    shown = [span for span in spans if span.thread in lanes]
    first = min(span.start_s for span in shown)
    total_us = (max(span.end_s for span in shown) - first) * 1e6
    scale = (_WIDTH - _LEFT - 10) / total_us
    colours = {part: _COLOURS[i % len(_COLOURS)] for i, part in enumerate(_parts(shown))}
    body: list[str] = []
    top = _TOP
    for thread, name in lanes.items():
        own = [span for span in shown if span.thread == thread]
        if not own:
            continue
        body.append(_text(8, top + 15, name, weight="bold"))
        for span in own:
            start_us, length_us = (span.start_s - first) * 1e6, (span.end_s - span.start_s) * 1e6
            x, width = _LEFT + start_us * scale, max(length_us * scale, 0.5)
            y = top + span.depth * _ROW
            body.append(_box(x, y, width, span.part, start_us, length_us, colours[span.part]))
        top += (max(span.depth for span in own) + 1) * _ROW + _GAP
    height = top + 24
    size = f'width="{_WIDTH}" height="{height}"'
    font = 'font-family="sans-serif" font-size="11"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            f'<rect {size} fill="white"/>',
            _text(8, 20, title, weight="bold"),
            *_axis(total_us, scale, top),
            *body,
            "</svg>",
            "",
        ]
    )


def _parts(spans: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(span.part for span in sorted(spans, key=lambda s: s.start_s)))


def _axis(total_us: float, scale: float, bottom: float) -> list[str]:
    """Grid lines at round numbers of microseconds, about ten of them."""
    tick = next(
        base * 10**power
        for power in range(7)
        for base in (1, 2, 5)
        if total_us / (base * 10**power) <= 12
    )
    lines = []
    for number in range(int(total_us // tick) + 1):
        x = _LEFT + number * tick * scale
        lines.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom:.0f}" stroke="#ddd"/>'
        )
        lines.append(_text(x + 2, _TOP - 12, f"{number * tick} µs", colour="#666"))
    return lines


def _box(
    x: float, y: float, width: float, part: str, start_us: float, length_us: float, colour: str
) -> str:
    hint = f"{part}: {length_us:.1f} µs, from {start_us:.1f} µs"
    room = int((width - 4) / _CHAR)
    label = part if len(part) <= room else part[: max(room - 1, 0)] + "…"
    text = _text(x + 3, y + 14, label) if room >= 3 else ""
    return (
        f'<g><title>{escape(hint)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW - 3}" fill="{colour}" stroke="#555" stroke-width="0.4"/>{text}</g>'
    )


def _text(x: float, y: float, text: str, *, weight: str = "normal", colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.0f}" font-weight="{weight}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
