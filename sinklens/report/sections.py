"""One section a head: what it does with its sink, on which text, what its interventions cost, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import pandas as pd

from sinklens.report.charts import effects_chart
from sinklens.report.gathering import Runs
from sinklens.triggers.report import sentence
from sinklens.vocabulary import Head

MOST_PASSAGES, MOST_TOKENS = 2, 96
_FINDINGS = {
    "n1": "N1 silent where dormant", "n2": "N2 needed where active", "n3": "N3 the sink's value is not needed",
    "n4": "N4 a forced read-out hurts", "n5": "N5 works without normalization or sink",
}  # fmt: skip


def head_sections(runs: Runs) -> Iterator[tuple[str, str]]:
    """Name and HTML of each selected head."""
    for head in runs.selected():
        parts = [_scanned(runs, head), _judged(runs, head), _tested(runs, str(head)), _read(runs, head)]
        content = "".join(parts)
        if content:
            yield str(head), f'<article id="{head}"><h3>{head}</h3>{content}</article>'


def other_units(runs: Runs) -> str:
    """Charts of sets of heads and of controls."""
    if runs.contrast is None:
        return ""
    frame = runs.contrast.frame
    units = frame[frame.role != "sink"].drop_duplicates("heads")
    if units.empty:
        return ""
    sets = runs.contrast.settings.get("sets", {})
    parts = ["<section aria-labelledby='others'><h2 id='others'>Sets of heads, and control heads</h2>",
             "<p>A control is the head with the least sink mass in a tested layer.</p>"]  # fmt: skip
    for _, unit in units.iterrows():
        parts.append(f"<article><h3>{escape(unit['heads'])} ({unit.role})</h3>")
        parts.append(f"<p>{escape(sets[unit['heads']])}</p>" if unit["heads"] in sets else "")
        parts.append(f"{_tested(runs, unit['heads'])}</article>")
    return "".join([*parts, "</section>"])


def toy_section(runs: Runs) -> str:
    """What the paper's models do, with its figures where they lie in the folder."""
    if not runs.toy:
        return ""
    rows = [
        f"<tr><th scope='row'>{escape(name)}</th><td>{s['solved']} of {s['seeds']}</td>"
        f"<td>{_interval(s['off'])}</td><td>{_interval(s['at'])}</td></tr>"
        for name, s in runs.toy.items()
    ]
    figures = "".join(f"<figure>{path.read_text(encoding='utf-8')}<figcaption>{escape(path.stem)}</figcaption></figure>"
                      for path in runs.toy_figures)  # fmt: skip
    return (
        "<section aria-labelledby='toy'><h2 id='toy'>Toy models</h2><div class='scroll'><table class='plain'><tr>"
        "<th scope='col'>models</th><th scope='col'>solved</th><th scope='col'>weight on BOS off the trigger</th>"
        f"<th scope='col'>at the trigger</th></tr>{''.join(rows)}</table></div>{figures}</section>"
    )


def _interval(value: Any) -> str:
    low, high = value.get("low"), value.get("high")
    middle = value.get("mean", value.get("estimate"))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]" if None not in (middle, low, high) else "–"


def _row(frame: pd.DataFrame, head: Head) -> Any:
    mine = frame[(frame.layer == head.layer) & (frame["head"] == head.head)]
    return None if mine.empty else mine.iloc[0]


def _scanned(runs: Runs, head: Head) -> str:
    row = None if runs.scan is None else _row(runs.scan.frame, head)
    if row is None:
        return ""
    said = [
        f"{row.sink_mass:.0%} of its weight lies on the sink, {row.boost:.0f} times what uniform attention puts there."
    ]
    # A scan without outputs does not know these.
    if row.dormant_fraction == row.dormant_fraction:
        said.append(f"It is dormant at {row.dormant_fraction:.0%} of the tokens.")
    if row.value_ratio == row.value_ratio:
        said.append(f"The sink's value is {row.value_ratio:.2f} times as large as other values.")
    return f"<p>{' '.join(said)}</p>"


def _judged(runs: Runs, head: Head) -> str:
    row = None if runs.verdicts is None else _row(runs.verdicts.frame, head)
    if row is None or runs.verdicts is None:
        return ""
    answer = {True: "yes", False: "no"}
    findings = "".join(
        f"<li>{words}: {'cannot be tested here' if pd.isna(row[key]) else answer[bool(row[key])]}</li>"
        for key, words in _FINDINGS.items() if key in row
    )  # fmt: skip
    said = f"<p><strong>Verdict: {escape(row.verdict)}</strong>. Reason: {escape(str(row.reason))}.</p>"
    return f"{said}<ul class='findings'>{findings}</ul>"


def _tested(runs: Runs, unit: str) -> str:
    if runs.contrast is None:
        return ""
    frame = runs.contrast.shown
    mine = frame[(frame["heads"] == unit) & (frame.metric == "kl")]
    if mine.empty:
        return ""
    words = runs.contrast.settings["interventions"]
    shares = ", ".join(f"{row.share:.0%} {row.tokens}" for _, row in mine.drop_duplicates("tokens").iterrows()
                       if row.tokens in ("dormant", "active"))  # fmt: skip
    chart = effects_chart(mine, words, f"KL of each intervention at {unit}; the numbers are in the table below")
    return (f"<p>Tokens: {shares}; the rest lies between.</p><div class='scroll' tabindex='0' role='region' "
            f"aria-label='Chart of {escape(unit)}'>{chart}</div>"
            f"{_numbers(frame[frame['heads'] == unit], words)}")  # fmt: skip


def _numbers(frame: pd.DataFrame, words: Any) -> str:
    lines = []
    for (name, state), group in frame[frame["count"] > 0].groupby(["intervention", "tokens"], sort=False):
        cells = {row.metric: f"{row.estimate:.4f} [{row.low:.4f}, {row.high:.4f}]" for _, row in group.iterrows()}
        numbers = "".join(f"<td>{cells.get(metric, '')}</td>" for metric in ("kl", "dloss", "output_error"))
        lines.append(f"<tr><th scope='row' title='{escape(words.get(name, ''))}'>{name}</th><td>{state}</td>"
                     f"<td>{group['count'].iloc[0]}</td>{numbers}</tr>")  # fmt: skip
    columns = ("what", "tokens", "count", "KL, nats", "loss change, nats", "output error / variance")
    heads = "".join(f"<th scope='col'>{text}</th>" for text in columns)
    return (f"<details><summary>Numbers, with 95 % intervals over sequences</summary><div class='scroll'>"
            f"<table class='plain'><tr>{heads}</tr>{''.join(lines)}</table></div></details>")  # fmt: skip


def _read(runs: Runs, head: Head) -> str:
    """Real text: each token coloured by how little of the head's weight lies on the sink there."""
    row = None if runs.triggers is None else _row(runs.triggers.confirmed, head)
    if row is not None and runs.triggers is not None:
        marks = runs.triggers.frames["passages"]
        marks = marks[(marks.layer == head.layer) & (marks["head"] == head.head) & (marks.direction == row.direction)]
        said = (
            f"<p>{escape(sentence(row))}. Grade: {escape(row.grade)}; counterfactual {escape(row.counterfactual)}.</p>"
        )
        return said + _passages(marks)
    marks = None if runs.scan is None else runs.scan.frames.get("passages")
    if marks is None or str(head) not in marks:
        return ""
    return _passages(marks.assign(awake=1 - marks[str(head)], trigger=False))


def _passages(marks: pd.DataFrame) -> str:
    underlined = "triggers are <u>underlined</u>, " if bool(marks.trigger.any()) else ""
    parts = [
        "<p class='legend'>On text: <span class='tok' style='--a:0'>all weight on the sink</span> <span class='tok' "
        f"style='--a:.5'>half</span> <span class='tok' style='--a:1'>none</span>; {underlined}pale tokens do not "
        "count.</p>"
    ]
    for name, passage in list(marks.groupby("passage", sort=False))[:MOST_PASSAGES]:
        tokens = "".join(_token(row) for row in passage.head(MOST_TOKENS).itertuples())
        parts.append(f"<p class='text' aria-label='{escape(str(name))}'>{tokens}</p>")
    return "".join(parts)


def _token(row: Any) -> str:
    text = escape(row.token).replace("\n", "⏎\n")
    kinds = "tok" + (" t" if row.trigger else "") + ("" if row.counted else " pale")
    return f"<span class='{kinds}' style='--a:{row.awake:.2f}' title='{1 - row.awake:.2f} on the sink'>{text}</span>"
