"""Drawings of toy results. They draw what is handed to them; nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import plotly.graph_objects as go

SCALE = "Cividis"
"""Readable with every common colour-vision deficiency, and in grey."""
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Okabe-Ito colours."""
FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True, eq=False)
class Panel:
    """One head's mean pattern.

    Attributes:
        title: What stands above it.
        pattern: ``[query, key]``.
    """

    title: str
    pattern: np.ndarray


def pattern_grid(panels: Sequence[Sequence[Panel]], *, title: str, caption: str, trigger: int) -> go.Figure:
    """Patterns in a grid, rows of panels from top to bottom; keys to the right, queries downwards.

    Args:
        panels: Rows of panels.
        title: Title of the figure.
        caption: The statistics that belong to it, lines separated by ``<br>``.
        trigger: Position of the trigger, marked on both axes.
    """
    from plotly.subplots import make_subplots

    rows, columns = len(panels), len(panels[0])
    size = 300 if columns < 4 else 200
    titles = [panel.title for row in panels for panel in row]
    gap = 76 if rows > 1 else 0
    plot_height = rows * size + (rows - 1) * gap
    plot_width = columns * size + (columns - 1) * 52
    figure = make_subplots(
        rows, columns, subplot_titles=titles, vertical_spacing=gap / plot_height, horizontal_spacing=52 / plot_width
    )
    peak = max(1.0, max(float(panel.pattern.max()) for row in panels for panel in row))
    for r, row in enumerate(panels, 1):
        for c, panel in enumerate(row, 1):
            figure.add_trace(_heatmap(panel.pattern, trigger), r, c)
    ticks, words = _ticks(len(panels[0][0].pattern), trigger)
    figure.update_xaxes(tickvals=ticks, ticktext=words, showgrid=False, zeroline=False, constrain="domain", tickangle=0)
    figure.update_yaxes(tickvals=ticks, ticktext=words, showgrid=False, zeroline=False, autorange="reversed")
    for c in range(1, columns + 1):
        figure.update_xaxes(title_text="key", row=rows, col=c, title_standoff=4)
    for r in range(1, rows + 1):
        figure.update_yaxes(title_text="query", row=r, col=1, title_standoff=4)
    lines = caption.count("<br>") + 1
    bottom = 70 + 17 * lines
    figure.update_layout(
        template="plotly_white", title={"text": title, "font": {"size": 15}, "x": 0.02, "xanchor": "left"},
        width=plot_width + 170, height=plot_height + 90 + bottom, margin={"l": 70, "r": 100, "t": 90, "b": bottom},
        coloraxis={"colorscale": SCALE, "cmin": 0, "cmax": peak,
                   "colorbar": {"title": {"text": "weight", "side": "right"}, "thickness": 14}},
    )  # fmt: skip
    figure.update_annotations(font_size=12 if columns < 4 else 11)
    _caption(figure, caption)
    return figure


def _heatmap(pattern: np.ndarray, trigger: int) -> Any:
    import plotly.graph_objects as go

    future = np.triu(np.ones_like(pattern, dtype=bool), 1)
    names = ["BOS", *("trigger" if i == trigger else f"token {i}" for i in range(1, len(pattern)))]
    return go.Heatmap(
        z=np.where(future, np.nan, pattern), coloraxis="coloraxis", hoverongaps=False,
        customdata=[[[query, key] for key in names] for query in names],
        hovertemplate="%{customdata[0]} looks at %{customdata[1]}: %{z:.4f}<extra></extra>",
    )  # fmt: skip


def _ticks(length: int, trigger: int) -> tuple[list[int], list[str]]:
    step = max(1, length // 5)
    others = [i for i in range(step, length, step) if abs(i - trigger) > 1]
    return [0, trigger, *others], ["BOS", "T", *map(str, others)]


def _caption(figure: go.Figure, caption: str) -> None:
    figure.add_annotation(
        text=caption, xref="paper", yref="paper", x=0, y=0, xanchor="left", yanchor="top", yshift=-52, xshift=-40,
        showarrow=False, align="left", font={"size": 12},
    )  # fmt: skip


def error_against_sink(curves: Mapping[str, np.ndarray], *, title: str, caption: str) -> go.Figure:
    """Batch error against ``1 - BOS mass off the trigger`` along training, both on log axes, with the line of equality.

    Args:
        curves: Rows of (seed, error, 1 - mass) for each named set of models.
        title: Title of the figure.
        caption: What to read from it.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    for color, (name, points) in zip(COLORS, curves.items(), strict=False):
        for seed in np.unique(points[:, 0]):
            part = points[points[:, 0] == seed]
            figure.add_trace(
                go.Scatter(
                    x=part[:, 1], y=np.maximum(part[:, 2], 1e-6), mode="lines+markers", name=name, legendgroup=name,
                    showlegend=bool(seed == points[0, 0]), line={"color": color, "width": 1}, marker={"size": 4},
                    hovertemplate=f"seed {int(seed)}: error %{{x:.4f}}, 1 - mass %{{y:.2g}}<extra>{name}</extra>",
                )
            )  # fmt: skip
    everything = np.concatenate(list(curves.values()))
    ends = [float(everything[:, 1].min()), float(everything[:, 1].max())]
    figure.add_trace(
        go.Scatter(x=ends, y=ends, mode="lines", line={"color": "#444", "dash": "dash", "width": 1}, hoverinfo="skip",
                   name="missing mass = error")
    )  # fmt: skip
    figure.update_layout(
        template="plotly_white", title={"text": title, "font": {"size": 15}}, width=760, height=560,
        margin={"l": 80, "r": 30, "t": 70, "b": 130}, legend={"x": 0.01, "xanchor": "left", "y": 0.99},
    )  # fmt: skip
    decades = {"type": "log", "dtick": 1, "exponentformat": "power"}
    figure.update_xaxes(title="largest error in the batch", **decades)
    figure.update_yaxes(title="1 - weight on BOS off the trigger", **decades)
    _caption(figure, caption)
    return figure


@dataclass(frozen=True)
class Bar:
    """One cell of the factorial, ready to be drawn.

    Attributes:
        name: The cell.
        group: What the cells of one colour share.
        value: Mean over seeds.
        low: Lower bound of its interval.
        high: Upper bound.
        solved: Whether every seed solved the task; the others are drawn pale.
    """

    name: str
    group: str
    value: float
    low: float
    high: float
    solved: bool


def bars(cells: Sequence[Bar], *, title: str, axis: str, legend: str, caption: str) -> go.Figure:
    """Horizontal bars with intervals, one a cell, one colour a group.

    Args:
        cells: From top to bottom.
        title: Title of the figure.
        axis: What the length of a bar means.
        legend: What the groups say.
        caption: What to read from it.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    groups = list(dict.fromkeys(cell.group for cell in cells))
    for color, group in zip(COLORS, groups, strict=False):
        part = [cell for cell in cells if cell.group == group]
        above, below = [cell.high - cell.value for cell in part], [cell.value - cell.low for cell in part]
        figure.add_trace(
            go.Bar(
                y=[cell.name for cell in part], x=[cell.value for cell in part], orientation="h", name=group,
                marker={"color": color, "opacity": [1.0 if cell.solved else 0.35 for cell in part]},
                error_x={"type": "data", "array": above, "arrayminus": below, "color": "#444", "thickness": 1},
                hovertemplate="%{y}: %{x:.3f}<extra>" + group + "</extra>",
            )
        )  # fmt: skip
    lines = caption.count("<br>") + 1
    figure.update_layout(
        template="plotly_white", title={"text": title, "font": {"size": 15}, "x": 0.02, "xanchor": "left"},
        width=860, height=190 + 24 * len(cells) + 17 * lines, bargap=0.25,
        margin={"l": 170, "r": 30, "t": 90, "b": 75 + 17 * lines},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "title": {"text": legend}},
    )  # fmt: skip
    names = [cell.name for cell in cells]
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], automargin=True)
    figure.update_xaxes(title=axis, title_standoff=6)
    _caption(figure, caption)
    return figure


def picture(figure: go.Figure) -> Any:
    """The figure as a small static picture for a notebook; the figure itself where there is no renderer."""
    import tempfile

    draw = renderer()
    if draw is None:
        return figure
    from IPython.display import SVG

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figure.svg"
        draw([(figure, file)])
        return SVG(file.read_text(encoding="utf-8"))


def write(figures: Mapping[str, go.Figure], out: Path) -> list[Path]:
    """Write each figure as interactive HTML and, where a renderer is installed, as PNG, SVG and PDF.

    Returns:
        The files written; only HTML where there is no renderer, see :func:`renderer`.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        written.append(out / f"{name}.html")
        figure.write_html(written[-1], include_plotlyjs=True)
    draw = renderer()
    if draw is None:
        return written
    jobs = [(figure, out / f"{name}.{kind}") for name, figure in figures.items() for kind in FORMATS]
    draw(jobs)
    return [*written, *(path for _, path in jobs)]


Renderer: TypeAlias = "Callable[[list[tuple[go.Figure, Path]]], None]"
NO_RENDERER = (
    "no static pictures: they need kaleido 0.2, which brings its own renderer, or kaleido 1 with Chrome or Chromium"
)


def renderer() -> Renderer | None:
    """What turns figures into static pictures here: kaleido 0.2, else kaleido 1 if it finds a browser, else None."""
    with suppress(ImportError):
        from kaleido.scopes.plotly import PlotlyScope

        return partial(_with_scope, PlotlyScope)
    with suppress(ImportError, AttributeError):
        from choreographer.browsers.chromium import Chromium

        if Chromium.find_browser(skip_local=False):
            return _with_browser
    return None


def _with_scope(scope_type: Any, jobs: list[tuple[go.Figure, Path]]) -> None:
    import plotly

    # Its own plotly.js is older than the figures.
    scope = scope_type(plotlyjs=str(Path(plotly.__file__).parent / "package_data" / "plotly.min.js"))
    for figure, path in jobs:
        size = {"width": figure.layout.width, "height": figure.layout.height}
        path.write_bytes(scope.transform(figure, format=path.suffix[1:], scale=_scale(path), **size))


def _with_browser(jobs: list[tuple[go.Figure, Path]]) -> None:
    import plotly.io

    # One call: starting the browser costs more than drawing. It does not read the size from the layout by itself.
    figures, paths = [figure for figure, _ in jobs], [path for _, path in jobs]
    widths, heights = [figure.layout.width for figure in figures], [figure.layout.height for figure in figures]
    scales = [_scale(path) for path in paths]
    plotly.io.write_images(figures, paths, width=widths, height=heights, scale=scales)


def _scale(path: Path) -> int:
    # Dots need to be dense; a vector picture takes the figure's own size on a page.
    return 1 if path.suffix == ".svg" else 2
