"""Results to plotly figures: static first, self-contained, no global style. Plots draw; they never compute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go

if TYPE_CHECKING:
    from sinklens.table import HeadTable

MAP_SCALE = "Cividis"
"""Readable with every common colour-vision deficiency, and in grey."""


def head_map(table: HeadTable, column: str, *, title: str | None = None) -> go.Figure:
    """The layer-by-head map of one column; the same map everywhere.

    Hover names the head, its kv head where known, the value and, where the table has them, its interval.
    """
    frame = table.frame
    grid = frame.pivot(index="layer", columns="head", values=column)
    hover = frame.assign(text=[_hover(row, column) for _, row in frame.iterrows()])
    texts = hover.pivot(index="layer", columns="head", values="text")
    figure = go.Figure(
        go.Heatmap(
            z=grid.to_numpy(dtype=float), x=list(grid.columns), y=list(grid.index), text=texts.to_numpy(),
            hovertemplate="%{text}<extra></extra>", colorscale=MAP_SCALE, xgap=1, ygap=1,
            colorbar={"title": {"text": column.replace("_", " "), "side": "right"}, "thickness": 14},
        )
    )  # fmt: skip
    layers, heads = grid.shape
    unit = table.units.get(column, "")
    figure.update_layout(
        title={"text": title or f"{column.replace('_', ' ')}: {unit}" if unit else column, "font": {"size": 14}},
        width=min(1100, 260 + max(24 * heads, 180)),
        height=min(1500, 140 + max(16 * layers, 160)),
        margin={"l": 60, "r": 30, "t": 60, "b": 50},
        template="plotly_white",
    )
    figure.update_xaxes(title="head", tickmode="linear", dtick=_step(heads), showgrid=False, zeroline=False)
    figure.update_yaxes(
        title="layer", tickmode="linear", dtick=_step(layers), autorange="reversed", showgrid=False, zeroline=False
    )
    return figure


def _step(count: int) -> int:
    return max(1, 2 ** math.ceil(math.log2(count / 20))) if count > 20 else 1


def _hover(row: object, column: str) -> str:
    cells: dict[str, object] = dict(row.items())  # type: ignore[attr-defined]
    lines = [f"layer {cells['layer']}, head {cells['head']}"]
    if "kv_head" in cells:
        lines.append(f"kv head {cells['kv_head']}")
    lines.append(f"{column.replace('_', ' ')} {cells[column]:.3f}")
    if "sink_token" in cells:
        lines.append(f"sink at position {cells['sink_position']}: {str(cells['sink_token'])!r}")
    if {"low", "high"} <= cells.keys():
        lines.append(f"95 % interval {cells['low']:.3f} to {cells['high']:.3f}")
    return "<br>".join(lines)
