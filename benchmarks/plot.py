"""An SVG of planning time against the number of ranks, from the JSON of `benchmarks.simulate`.

usage: python -m benchmarks.plot simulation.json docs/planning.svg
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 70, 60, 40, 160
SERIES = (
    (
        "N saved, N loading: one rank",
        "#1f77b4",
        lambda row: row["saved_ranks"] == row["loading_ranks"],
    ),
    ("N saved, 8 loading: one rank", "#d62728", lambda row: row["loading_ranks"] == 8),
)


def scale(value: float, low: float, high: float, start: float, end: float) -> float:
    """Place of a value on a logarithmic axis."""
    share = (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low))
    return start + share * (end - start)


def _tick_y(at: float, text: str) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _tick_x(at: float, text: str) -> str:
    return (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
        f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>'
    )


def draw(rows: Sequence[dict[str, float]]) -> str:
    """The picture."""
    ranks = sorted({int(row["saved_ranks"]) for row in rows})
    low, high = 0.05, 10.0

    def x(value: float) -> float:
        return scale(value, ranks[0], ranks[-1], LEFT, WIDTH - RIGHT)

    def y(value: float) -> float:
        return scale(max(value, low), low, high, HEIGHT - BOTTOM, TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Planning one rank&#8217;s load of a 70B model '
        f"with Adam state, seconds</text>",
    ]
    parts += [_tick_y(y(tick), f"{tick:g}") for tick in (0.1, 1.0, 10.0)]
    parts += [_tick_x(x(rank), str(rank)) for rank in ranks]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 15}" text-anchor="middle">ranks that '
        f"saved (N)</text>"
    )
    for title, color, belongs in SERIES:
        points = [(row["saved_ranks"], row["plan_seconds"]) for row in rows if belongs(row)]
        path = " ".join(f"{x(n):.1f},{y(s):.1f}" for n, s in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for n, s in points:
            parts.append(f'<circle cx="{x(n):.1f}" cy="{y(s):.1f}" r="3.5" fill="{color}"/>')
        last = max(points)
        parts.append(
            f'<text x="{x(last[0]) + 8:.1f}" y="{y(last[1]) + 4:.1f}" fill="{color}">{title}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
