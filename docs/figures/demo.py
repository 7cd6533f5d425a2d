"""The picture and the table of README and results page: ``make demo``, then ``python docs/figures/demo.py runs/demo``.

Left the layer-by-head map of the scan, right what three interventions cost at the tested heads. Needs kaleido.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import sinklens as sl
from sinklens.plots import MAP_SCALE, STATE_COLORS
from sinklens.toy.figures import NO_RENDERER, renderer
from sinklens.toy.reports import markdown, put_between

SHOWN = {"C1": "drop the sink", "C2": "drop, renormalize", "Z": "silence the head"}
TICKS = [10.0**power for power in range(-5, 2)]
COLUMNS = {"Z": "silence the head", "C1": "drop the sink", "C2": "drop, renormalize", "C4": "ReLU, no sink, unfitted"}
SYMBOLS = {"dormant": "circle", "active": "square"}


def draw(scan: sl.SinkScan, contrast: sl.Contrast) -> go.Figure:
    """Both panels."""
    heads = [str(head) for head in contrast.heads]
    figure = make_subplots(rows=1, cols=1 + len(heads), subplot_titles=["weight on the first token", *heads])
    grid = scan.frame.pivot(index="layer", columns="head", values="sink_mass")
    bar = {"thickness": 10, "x": 0.185, "len": 0.9, "xanchor": "left"}
    figure.add_heatmap(z=grid.to_numpy(), x=grid.columns, y=grid.index, colorscale=MAP_SCALE, xgap=1, ygap=1,
                       zmin=0, zmax=1, colorbar=bar, row=1, col=1)  # fmt: skip
    for place, head in enumerate(heads):
        for state, color in STATE_COLORS.items():
            rows = contrast.effects(head, state).loc[list(SHOWN)]  # type: ignore[arg-type]
            rows = rows[rows["count"] > 0]
            figure.add_scatter(
                x=[SHOWN[name] for name in rows.index], y=rows.kl, mode="markers", name=f"{state} tokens",
                marker={"color": color, "size": 9, "symbol": SYMBOLS[state]}, legendgroup=state, showlegend=place == 1,
                error_y={"array": rows.kl_high - rows.kl, "arrayminus": rows.kl - rows.kl_low, "thickness": 1.5},
                row=1, col=2 + place,
            )  # fmt: skip
        figure.update_yaxes(type="log", range=[-5, 1], tickvals=TICKS, ticktext=[f"{tick:g}" for tick in TICKS],
                            showticklabels=place == 0, title="KL, nats a token" if place == 0 else None,
                            row=1, col=2 + place)  # fmt: skip
        figure.update_xaxes(range=[-0.6, 2.6], tickangle=-40, row=1, col=2 + place)
    figure.update_xaxes(title="head", dtick=2, showgrid=False, row=1, col=1)
    figure.update_yaxes(title="layer", autorange="reversed", dtick=4, showgrid=False, row=1, col=1)
    # Room for the colour bar and the axis labels between the map and the panels.
    wide = 0.7 / len(heads)
    domains = [(0.0, 0.18), *((0.3 + wide * i, 0.3 + wide * (i + 0.88)) for i in range(len(heads)))]
    for axis, domain, title in zip(figure.select_xaxes(), domains, figure.layout.annotations, strict=True):
        axis.domain = domain
        title.update(x=sum(domain) / 2, font_size=14)
    figure.update_layout(template="plotly_white", width=1080, height=470, margin={"l": 55, "r": 15, "t": 60, "b": 100},
                         legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.2})  # fmt: skip
    return figure


def rows(contrast: sl.Contrast) -> list[dict[str, str]]:
    """One row a head and state: KL in nats a token, with intervals."""
    found = []
    for head in map(str, contrast.heads):
        for state in STATE_COLORS:
            effects = contrast.effects(head, state)  # type: ignore[arg-type]
            first = effects.iloc[0]
            cells = {words: interval(effects.loc[name]) for name, words in COLUMNS.items()}
            found.append({"head": head, "weight on sink": f"{first.sink_mass:.3f}",
                          "tokens": f"{state} ({first.share:.0%})", **cells})  # fmt: skip
    return found


def interval(row: Any) -> str:
    """``.0014 [.0013, .0015]``; a dash where there are no tokens."""
    if not row["count"]:
        return "-"
    return f"{row.kl:.4f} [{row.kl_low:.4f}, {row.kl_high:.4f}]"


def main(run: str) -> None:
    """Read a run, write the picture and the table."""
    scan, contrast = sl.SinkScan.load(run), sl.Contrast.load(run)
    here = Path(__file__).parent
    figure = draw(scan, contrast)
    render = renderer()
    if render is None:
        raise SystemExit(NO_RENDERER)
    render([(figure, here / "demo.png")])
    text = f"{scan.reading()}\n\n{markdown(rows(contrast))}"
    for page in (here.parent.parent / "README.md", here.parent / "results.md"):
        put_between(page, "demo", text)


if __name__ == "__main__":
    main(sys.argv[1])
