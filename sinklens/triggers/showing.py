"""Passages as HTML: each token coloured by how awake a head is, trigger tokens underlined; one self-contained file.

Text takes the page's own colour and the background is a see-through orange, so that it reads in light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.errors import InputError
from sinklens.table import replacing, writable
from sinklens.vocabulary import Head

if TYPE_CHECKING:
    import pandas as pd

    from sinklens.triggers.report import TriggerReport

# The map is drawn for a light page; turning lightness round and hue back keeps red red and blue blue in the dark.
STYLE = """<style>
.sinklens{font:15px/1.7 system-ui,sans-serif;max-width:62em}
.sinklens p.text{font:14px/1.9 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.sinklens span{padding:.1em 0;border-radius:.15em}
.sinklens .t{text-decoration:underline;text-decoration-thickness:2px;text-underline-offset:.25em}
.sinklens .skipped{opacity:.45}
.sinklens .legend span{padding:.1em .6em}
.sinklens .wide{overflow-x:auto}
.sinklens table{border-collapse:collapse;font-size:13px;line-height:1.4}
.sinklens caption{text-align:left;padding:.5em .7em}
.sinklens td,.sinklens th{padding:.3em .7em;text-align:left;vertical-align:top;border-bottom:1px solid #8884}
.sinklens td{white-space:nowrap}
.sinklens td.words{white-space:normal;min-width:12em}
@media (prefers-color-scheme:dark){.sinklens .svg-container{filter:invert(.93) hue-rotate(180deg)}}
</style>"""
ORANGE, STRONGEST = "230,140,0", 0.6


@dataclass(frozen=True)
class Page:
    """A piece of HTML that shows itself in Jupyter and saves as a file.

    Attributes:
        title: What it shows.
        body: Escaped HTML without a document around it.
    """

    title: str
    body: str = field(repr=False)

    def _repr_html_(self) -> str:
        return f'{STYLE}<div class="sinklens">{self.body}</div>'

    def document(self) -> str:
        """The whole file."""
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            '<meta name="viewport" content="width=device-width"><style>:root{color-scheme:light dark}'
            "body{margin:2em}.sinklens .wide{width:calc(100vw - 5em);max-width:90em}"
            f"</style></head><body>{self._repr_html_()}</body></html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Write a self-contained HTML file, complete or not at all.

        Raises:
            InputError: The folder cannot be written.
        """
        path = Path(path)
        with writable(path.parent), replacing(path) as temporary:
            temporary.write_text(self.document(), encoding="utf-8")
        return path


def passages_of(report: TriggerReport, head: Head, direction: str | None = None) -> Page:
    """The report's passages with one head's state; see :meth:`TriggerReport.show`."""
    rows = report.confirmed
    mine = rows[(rows.layer == head.layer) & (rows["head"] == head.head)]
    mine = mine if direction is None else mine[mine.direction == direction]
    if mine.empty:
        known = dict.fromkeys(Head(int(r.layer), int(r["head"])) for _, r in rows.iterrows())
        listed = ", ".join(map(str, known)) or "a report that confirmed some"
        raise InputError("this head has no confirmed triggers", expected=f"one of {listed}",
                         got=f"{head} {direction or ''}".strip())  # fmt: skip
    row = mine.iloc[0]
    marks = report.frames["passages"]
    marks = marks[(marks.layer == head.layer) & (marks["head"] == head.head) & (marks.direction == row.direction)]
    return Page(f"{head} {row.direction}", "".join(_passages(row, marks)))


def _passages(row: Any, marks: pd.DataFrame) -> Iterator[str]:
    from sinklens.triggers.report import sentence

    yield f"<h3>{escape(sentence(row))}</h3>"
    yield (f'<p class="legend">Head {_span("asleep", 0.0)} {_span("half", 0.5)} {_span("awake", 1.0)}; triggers are '
           f'<span class="t">underlined</span>, the first tokens (pale) do not count. Grade: {escape(row.grade)}; '
           f"counterfactual {escape(row.counterfactual)}.</p>")  # fmt: skip
    for name, passage in marks.groupby("passage", sort=False):
        yield f"<h4>{escape(str(name))}</h4><p class='text'>"
        yield "".join(
            _span(text, awake, trigger=trigger, skipped=not counted) for text, awake, trigger, counted
            in zip(passage.token, passage.awake, passage.trigger, passage.counted, strict=True)
        )  # fmt: skip
        yield "</p>"


def _span(text: str, awake: float, *, trigger: bool = False, skipped: bool = False) -> str:
    # A line break has no width: a mark shows its colour.
    shown = escape(text).replace("\n", "⏎\n")
    kinds = " ".join(name for name, on in (("t", trigger), ("skipped", skipped)) if on)
    label = f' class="{kinds}"' if kinds else ""
    color = f"background:rgba({ORANGE},{STRONGEST * awake:.2f})"
    return f'<span{label} style="{color}" title="awake {awake:.2f}">{shown}</span>'


def page_of(report: TriggerReport, figure: str = "", most: int = 6) -> Page:
    """The whole report as one page: what it found, a map, the best sets as a table, and passages of some heads."""
    title = f"Trigger heads of {report.provenance.get('model', 'a model')}"
    parts = [f"<h2>{escape(title)}</h2><p>{escape(report.reading())}</p>", figure]
    rows = report.confirmed
    if not rows.empty:
        parts.append(_table(rows))
    for _, row in rows.head(most).iterrows():
        parts.append(passages_of(report, Head(int(row.layer), int(row["head"])), row.direction).body)
    return Page(title, "".join(parts))


def _table(rows: pd.DataFrame, most: int = 40) -> str:
    names = ("head", "direction", "trigger", "tokens", "asleep", "AUROC", "precision", "recall", "risk difference",
             "counterfactual", "grade")  # fmt: skip
    which = f"The {most} best explained of {len(rows)} confirmed sets." if len(rows) > most else "All confirmed sets."
    lines = [
        f'<div class="wide"><table><caption>{which}</caption><tr>',
        *(f"<th>{name}</th>" for name in names),
        "</tr>",
    ]
    for _, row in rows.head(most).iterrows():
        numbers = (f"{row[name]:.2f}" for name in ("dormant_fraction", "auroc", "precision", "recall"))
        interval = f"{row.risk_difference:.2f} [{row.low:.2f}, {row.high:.2f}]"
        # A space inside quotes is no place to break a line.
        words = (escape(re.sub(r"(?<=') | (?=',|'$)", "\u00a0", text)) for text in (row.trigger, row.tokens))
        cells = (*numbers, interval, row.counterfactual, row.grade)
        lines += [f"<tr><td>{Head(int(row.layer), int(row['head']))}</td><td>{escape(row.direction)}</td>",
                  *(f'<td class="words">{text}</td>' for text in words),
                  *(f"<td>{escape(str(cell))}</td>" for cell in cells), "</tr>"]  # fmt: skip
    return "".join([*lines, "</table></div>"])
