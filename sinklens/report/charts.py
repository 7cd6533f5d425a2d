"""Effects as inline SVG: a dot and its interval on a log axis, drawn in the page's own colours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

import pandas as pd

LEAST, MOST = 1e-5, 10.0
LEFT, WIDE, ROW, TOP = 345, 420, 24, 26
"""Pixels: where the axis begins, its length, the height of an intervention, and where the first one begins."""

_MARKS = {"dormant": "circle", "active": "rect"}


def effects_chart(effects: pd.DataFrame, words: Mapping[str, str], label: str) -> str:
    """KL of every intervention of one unit, dormant and active tokens apart.

    Args:
        effects: Rows of a contrast for one unit and the metric ``kl``.
        words: What each intervention does.
        label: What the chart shows, for those who hear it.
    """
    names = [name for name in dict.fromkeys(effects.intervention) if name != "C0"]
    height = TOP + ROW * len(names) + 40
    parts = [
        f'<svg class="chart" viewBox="0 0 {LEFT + WIDE + 30} {height}" width="{LEFT + WIDE + 30}" height="{height}" '
        f'role="img" aria-label="{escape(label)}">'
    ]
    for power in range(-5, 2):
        x = _x(10.0**power)
        text = f"≤{LEAST:g}" if power == -5 else f"{10.0**power:g}"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 36}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 22}" text-anchor="middle">{text}</text>')
    parts.append(
        f'<text x="{LEFT + WIDE / 2}" y="{height - 5}" text-anchor="middle">KL, nats a token (log scale)</text>'
    )
    indexed = effects[effects["count"] > 0].set_index(["intervention", "tokens"])
    for row, name in enumerate(names):
        y = TOP + ROW * row + ROW / 2 - 4
        title = words.get(name, "").partition(":")[0]
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(title)} <tspan font-weight="700">'
                     f"{escape(name)}</tspan></text>")  # fmt: skip
        for state, shift in (("dormant", -4), ("active", 4)):
            if (name, state) in indexed.index:
                parts.append(_mark(indexed.loc[(name, state)], state, y + shift))
    return "".join([*parts, _legend(list(dict.fromkeys(indexed.index.get_level_values("tokens")))), "</svg>"])


def _x(value: float) -> float:
    share = (math.log10(min(max(value, LEAST), MOST)) - math.log10(LEAST)) / (math.log10(MOST) - math.log10(LEAST))
    return LEFT + WIDE * share


def _mark(row: pd.Series, state: str, y: float) -> str:
    x = _x(row.estimate)
    bounds = [row.estimate if math.isnan(bound) else bound for bound in (row.low, row.high)]
    low, high = (_x(bound) for bound in bounds)
    line = f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
    said = f"<title>{state}: {row.estimate:.4g} [{bounds[0]:.4g}, {bounds[1]:.4g}], {row['count']} tokens</title>"
    return f'<g class="{state}">{said}{line}{_shape(state, x, y)}</g>'


def _shape(state: str, x: float, y: float) -> str:
    if _MARKS[state] == "circle":
        return f'<circle cx="{x:.1f}" cy="{y}" r="4"/>'
    return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5}" width="7" height="7"/>'


def _legend(states: list[str]) -> str:
    shown = [state for state in _MARKS if state in states]
    return "".join(
        f'<g class="{state}">{_shape(state, LEFT + 8 + 130 * place, 9)}</g>'
        f'<text x="{LEFT + 18 + 130 * place}" y="13">{state} tokens</text>'
        for place, state in enumerate(shown)
    )
