"""Results to plotly figures: static first, self-contained, no global style. Plots draw; they never compute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from sinklens.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from sinklens.causal import Contrast, Desinking
    from sinklens.table import HeadTable

MAP_SCALE = "Cividis"
"""Readable with every common colour-vision deficiency, and in grey."""


def picture(figure: go.Figure) -> Any:
    """The figure as a small static picture for a notebook; the interactive figure where there is no renderer."""
    from sinklens.toy.figures import picture as draw

    return draw(figure)


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
        title={"text": title or (f"{column.replace('_', ' ')}: {unit}" if unit else column), "font": {"size": 14}},
        width=min(1100, 260 + max(24 * heads, 180)),
        height=min(1500, 140 + max(16 * layers, 160)),
        margin={"l": 60, "r": 30, "t": 80, "b": 50},
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


def attention_map(pattern: Any, words: Sequence[str], *, hide: int = 1, title: str = "") -> go.Figure:
    """One head's attention on one text, queries downwards; the first ``hide`` keys are left out.

    The sink's column hides everything else: with ``hide=0`` most maps are one bright line at the left.

    Args:
        pattern: Weights ``[query, key]``, as of :func:`sinklens.attention_patterns`.
        words: The text of each position.
        hide: How many of the first keys are left out.
        title: What it shows.
    """
    shown = [str(word).replace("\n", "⏎") for word in words]
    places = list(range(len(shown)))
    figure = go.Figure(
        go.Heatmap(
            z=[list(map(float, row[hide:])) for row in pattern], x=places[hide:], y=places, zmin=0,
            colorscale=MAP_SCALE,
            text=[[f"{query!r} looks at {key!r}" for key in shown[hide:]] for query in shown],
            hovertemplate="%{text}: %{z:.3f}<extra></extra>",
            colorbar={"title": {"text": "weight", "side": "right"}, "thickness": 14},
        )
    )  # fmt: skip
    side = min(900, 200 + 11 * len(shown))
    figure.update_layout(title={"text": title, "font": {"size": 14}}, template="plotly_white", width=side,
                         height=side - 40, margin={"l": 90, "r": 30, "t": 60, "b": 90})  # fmt: skip
    step = _step(len(shown)) if len(shown) > 64 else 1
    for axis, name in ((figure.layout.xaxis, "key"), (figure.layout.yaxis, "query")):
        axis.update(title=name, tickvals=places[::step], ticktext=shown[::step], showgrid=False, zeroline=False,
                    tickfont={"size": 9})  # fmt: skip
    figure.update_xaxes(tickangle=-60)
    figure.update_yaxes(autorange="reversed")
    return figure


def contrast_bars(result: Contrast, metric: str = "kl") -> go.Figure:
    """Effects of every intervention, one panel a unit, tokens dormant and active side by side, with 95 % intervals."""
    from plotly.subplots import make_subplots

    frame = result.shown[result.shown.metric == metric]
    units = list(dict.fromkeys(frame["heads"]))
    titles = [_unit_title(frame[frame["heads"] == unit].iloc[0]) for unit in units]
    columns = min(3, len(units))
    lines = math.ceil(len(units) / columns)
    figure = make_subplots(rows=lines, cols=columns, subplot_titles=titles, shared_yaxes=False,
                           vertical_spacing=min(0.25, 0.35 / lines), horizontal_spacing=0.08)  # fmt: skip
    named: set[str] = set()
    for place, unit in enumerate(units):
        for state, color in STATE_COLORS.items():
            part = frame[(frame["heads"] == unit) & (frame.tokens == state) & (frame["count"] > 0)]
            if part.empty:
                continue
            bars = _bars(part, state, color, legend=state not in named)
            named.add(state)
            figure.add_trace(bars, place // columns + 1, place % columns + 1)
    words = result.settings["metrics"][metric]
    figure.update_layout(
        template="plotly_white", barmode="group", width=1080, height=190 + 250 * lines,
        title={"text": f"{words}; bars: 95 % interval over sequences", "font": {"size": 14}},
        legend={"orientation": "h", "y": 1 + 40 / (250 * lines), "x": 1, "xanchor": "right", "yanchor": "bottom"},
        margin={"l": 60, "r": 20, "t": 110, "b": 125},
    )  # fmt: skip
    figure.update_xaxes(tickangle=-45)
    words = result.settings.get("interventions", {})
    listed = [f"<b>{name}</b> {text.partition(':')[0]}" for name, text in words.items()]
    caption = "<br>".join("   ".join(listed[i : i + 4]) for i in range(0, len(listed), 4))
    figure.add_annotation(text=caption, xref="paper", yref="paper", x=0, y=0, yshift=-62, yanchor="top", xanchor="left",
                          showarrow=False, align="left", font={"size": 11})  # fmt: skip
    return figure


STATE_COLORS = {"dormant": "#0072b2", "active": "#e69f00"}
"""Two colours of the Okabe-Ito set: apart in every common colour-vision deficiency."""


def _unit_title(row: Mapping[str, object]) -> str:
    return f"{row['heads']} ({row['role']}, sink mass {row['sink_mass']:.2f})"


def _bars(part: pd.DataFrame, state: str, color: str, *, legend: bool) -> go.Bar:
    values = part.estimate
    return go.Bar(
        x=part.intervention, y=values, name=f"{state} tokens", legendgroup=state, showlegend=legend, marker_color=color,
        error_y={"array": part.high - values, "arrayminus": values - part.low, "thickness": 1},
        customdata=part[["low", "high", "count", "sequences"]],
        hovertemplate="%{x}: %{y:.4f} [%{customdata[0]:.4f}, %{customdata[1]:.4f}]"
        "<br>%{customdata[2]} tokens in %{customdata[3]} sequences<extra>" + state + "</extra>",
    )  # fmt: skip


def trigger_map(report: HeadTable, most: int = 40) -> go.Figure:
    """Confirmed trigger heads by the members of their sets: how much more often a head is awake at each."""
    confirmed = report.frame[report.frame.grade != "unconfirmed"]
    rows = confirmed.head(most)
    cells = report.frames["members"].merge(rows[["layer", "head", "direction"]]) if len(rows) else rows
    figure = go.Figure()
    heads = [f"L{layer}H{head}" for layer, head in zip(rows.layer, rows["head"], strict=True)]
    if len(cells):
        sign = cells.direction.map({"wakes": 1, "parks": -1})
        figure.add_heatmap(
            x=cells.words, y=[f"L{layer}H{head}" for layer, head in zip(cells.layer, cells["head"], strict=True)],
            z=cells.risk_difference * sign, zmid=0, zmin=-1, zmax=1, colorscale="RdBu_r", xgap=1, ygap=1,
            customdata=cells[["direction", "precision", "recall", "occurrences"]],
            hovertemplate="%{y} %{customdata[0]} at %{x}: %{z:.2f}<br>precision %{customdata[1]:.2f}, recall "
            "%{customdata[2]:.2f}, %{customdata[3]} tokens<extra></extra>",
            colorbar={"title": {"text": "awake: risk difference", "side": "right"}, "thickness": 14},
        )  # fmt: skip
    wide, high = (cells.words.nunique() if len(cells) else 0), len(set(heads))
    which = f"the {most} best explained of {len(confirmed)} sets" if len(confirmed) > most else f"{len(rows)} sets"
    title = f"What wakes heads (red), or makes them park (blue)<br><sup>{which}</sup>"
    figure.update_layout(
        title={"text": title, "font": {"size": 14}},
        template="plotly_white",
        width=max(420, 190 + 19 * wide), height=max(260, 230 + 18 * high), margin={"l": 70, "r": 30, "t": 60, "b": 150},
    )  # fmt: skip
    figure.update_xaxes(tickangle=-60, tickmode="linear", showgrid=False)
    figure.update_yaxes(tickmode="linear", autorange="reversed", categoryorder="array",
                        categoryarray=list(dict.fromkeys(heads)), showgrid=False)  # fmt: skip
    return figure


VERDICT_COLORS = {
    "supports fully": "#0072b2", "supports partly": "#56b4e9", "kernel": "#009e73", "always dormant": "#bbbbbb",
    "redundant": "#dddddd", "constant bias": "#e69f00", "broadcast": "#d55e00", "graded": "#cc79a7",
    "not forced": "#f0e442", "never dormant": "#f4f4f4", "undecided": "#777777",
}  # fmt: skip


def verdict_map(result: HeadTable) -> go.Figure:
    """One mark a head on the layer-by-head plane, coloured by its verdict; the legend names every colour."""
    figure = go.Figure()
    frame = result.frame
    for verdict, color in VERDICT_COLORS.items():
        part = frame[frame.verdict == verdict]
        if part.empty:
            continue
        figure.add_trace(
            go.Scatter(
                x=part["head"], y=part.layer, mode="markers", name=f"{verdict} ({len(part)})",
                marker={"color": color, "size": 13, "symbol": "square", "line": {"width": 1, "color": "#333333"}},
                customdata=part[["sink_mass", "log_ratio", "e4", "reason"]],
                hovertemplate="L%{y}H%{x}: " + verdict + "<br>%{customdata[3]}<br>sink mass %{customdata[0]:.2f}"
                "<br>log ratio %{customdata[1]:.2f}, E4 %{customdata[2]:.2f}<extra></extra>",
            )
        )  # fmt: skip
    layers, heads = int(frame.layer.max()) + 1, int(frame["head"].max()) + 1
    figure.update_layout(
        title={"text": "Verdicts", "font": {"size": 14}}, template="plotly_white",
        width=min(1200, 420 + 26 * heads), height=min(1500, 180 + 18 * layers),
        margin={"l": 60, "r": 30, "t": 60, "b": 50}, legend={"title": "verdict (heads)"},
    )  # fmt: skip
    figure.update_xaxes(title="head", tickmode="linear", dtick=_step(heads), range=[-0.6, heads - 0.4], zeroline=False)
    figure.update_yaxes(
        title="layer", tickmode="linear", dtick=_step(layers), range=[layers - 0.4, -0.6], zeroline=False
    )
    return figure


def desink_curve(result: Desinking) -> go.Figure:
    """Loss change, remaining sink heads and massive activations over the number of heads that lost their sink."""
    from plotly.subplots import make_subplots

    curve = result.curve
    titles = ("change of loss, % (95 % interval)", "heads above .3 on the sink",
              "largest residual entry / median")  # fmt: skip
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.08)
    for (text, part), color in zip(curve.groupby("text", sort=False), STATE_COLORS.values(), strict=False):
        start = part.loss.iloc[0]
        percent = {name: 100 * part[name] / start for name in ("change", "low", "high")}
        error = {"type": "data", "array": percent["high"] - percent["change"], "symmetric": False,
                 "arrayminus": percent["change"] - percent["low"], "width": 3}  # fmt: skip
        for column, values in ((1, percent["change"]), (2, part.sink_heads), (3, part.massive)):
            figure.add_trace(
                go.Scatter(x=part["heads"], y=values, mode="lines+markers", name=str(text), legendgroup=str(text),
                           showlegend=column == 1, line={"color": color}, error_y=error if column == 1 else None,
                           hovertemplate=f"{text}: %{{x}} heads, %{{y:.3g}}<extra></extra>"),
                1, column,
            )  # fmt: skip
    figure.update_layout(template="plotly_white", width=1080, height=400, margin={"l": 60, "r": 20, "t": 70, "b": 100},
                         legend={"orientation": "h", "y": -0.25, "x": 0, "yanchor": "top"})  # fmt: skip
    figure.update_xaxes(title="heads changed", rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


def dose_curves(result: Contrast, metric: str = "kl") -> go.Figure:
    """Effect over the dose, one panel a unit, one line for each intervention and state of the tokens.

    Reads the rows whose intervention is named ``ID@ALPHA``, as :meth:`sinklens.causal.Intervention.dose` names them.
    """
    from plotly.subplots import make_subplots

    frame = result.shown[(result.shown.metric == metric) & result.shown.intervention.str.contains("@")]
    if frame.empty:
        raise InputError(
            "a curve needs doses", expected="interventions=[INTERVENTIONS['C2'].dose(.25), ...]", got="none"
        )
    frame = frame.assign(dose=frame.intervention.str.partition("@")[2].astype(float),
                         what=frame.intervention.str.partition("@")[0])  # fmt: skip
    units = list(dict.fromkeys(frame["heads"]))
    titles = [_unit_title(frame[frame["heads"] == unit].iloc[0]) for unit in units]
    columns = min(3, len(units))
    lines = math.ceil(len(units) / columns)
    figure = make_subplots(rows=lines, cols=columns, subplot_titles=titles, horizontal_spacing=0.09,
                           vertical_spacing=min(0.25, 0.35 / lines))  # fmt: skip
    dashes = dict(zip(dict.fromkeys(frame.what), ("solid", "dash", "dot", "dashdot", "longdash"), strict=False))
    named: set[tuple[str, str]] = set()
    for place, unit in enumerate(units):
        for (what, state), part in frame[frame["heads"] == unit].groupby(["what", "tokens"], sort=False):
            if state not in STATE_COLORS or not part["count"].gt(0).all():
                continue
            part = part.sort_values("dose")
            figure.add_trace(
                go.Scatter(
                    x=part.dose, y=part.estimate, mode="lines+markers", name=f"{what}, {state} tokens",
                    legendgroup=f"{what} {state}", showlegend=(what, state) not in named,
                    line={"color": STATE_COLORS[state], "dash": dashes.get(what, "solid")},
                    error_y={"type": "data", "array": part.high - part.estimate, "symmetric": False,
                             "arrayminus": part.estimate - part.low, "width": 3},
                    hovertemplate=f"{what} at dose %{{x:g}}, {state} tokens: %{{y:.4f}}<extra></extra>",
                ),
                place // columns + 1, place % columns + 1,
            )  # fmt: skip
            named.add((what, state))
    figure.update_layout(
        title={"text": f"{result.settings['metrics'][metric]}; bars: 95 % interval", "font": {"size": 14}},
        template="plotly_white", width=min(1080, 340 + 320 * columns), height=170 + 260 * lines,
        margin={"l": 60, "r": 20, "t": 110, "b": 60},
        legend={"orientation": "h", "y": 1 + 30 / (260 * lines), "x": 1, "xanchor": "right", "yanchor": "bottom"},
    )  # fmt: skip
    figure.update_xaxes(title="dose", range=[-0.04, 1.04])
    figure.update_yaxes(rangemode="tozero")
    return figure
