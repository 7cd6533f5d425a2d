"""The page: sentences first, then the head map and the table, a section a head, and where the numbers come from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from plotly.colors import hex_to_rgb, sequential

from sinklens.plots import MAP_SCALE, VERDICT_COLORS
from sinklens.report.gathering import Runs, gather
from sinklens.report.sections import head_sections, other_units, toy_section
from sinklens.table import replacing, writable
from sinklens.triggers.report import TriggerReport

COLUMNS = (
    "kv_head", "sink_mass", "dormant_fraction", "verdict", "trigger", "grade", "boost", "value_ratio", "sink_position",
    "sink_token", "log_ratio", "e4", "auroc", "entropy",
)  # fmt: skip
"""What the table shows, in this order, of whatever results there are."""

MOST_SAID = 8
UNITS = {"verdict": "explained at the top"}
LABELS = {"e4": "E4", "auroc": "AUROC", "trigger": "wakes or parks at", "log_ratio": "log C2 / C1"}


def report(folder: str | Path) -> Path:
    """Turn the runs in a folder into one self-contained page, ``folder/report.html``.

    Args:
        folder: Holds what ``save`` or the commands wrote: scan, contrast, verdicts, triggers, toy; or folders of that.

    Returns:
        The page's path.

    Raises:
        InputError: No results, results of several models, or a folder that cannot be read or written.
    """
    folder = Path(folder)
    runs = gather(folder)
    with writable(folder), replacing(folder / "report.html") as path:
        path.write_text(render(runs), encoding="utf-8")
    return folder / "report.html"


def render(runs: Runs) -> str:
    """The page as text."""
    title = f"Attention sinks of {runs.model}"
    sections = list(head_sections(runs))
    linked = {name for name, _ in sections}
    data = table_of(runs, linked)
    body = [f"<header><h1>{escape(title)}</h1>{_summary(runs)}</header>"]
    if data["rows"]:
        body.append(_part("page.html"))
    if sections:
        body.append(f'<section aria-labelledby="heads"><h2 id="heads">Heads</h2>{_note(runs, len(sections))}'
                    f"{''.join(html for _, html in sections)}</section>")  # fmt: skip
    body += [other_units(runs), toy_section(runs), _provenance(runs)]
    # The data stand inside a script element, which "</" would end.
    content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_part('page.css')}</style></head><body><a class='skip' href='#main'>Skip to the content</a>"
        f"<main id='main'>{''.join(body)}</main>"
        f"<script type='application/json' id='data'>{content}</script><script>{_part('page.js')}"
        "</script></body></html>\n"
    )


def table_of(runs: Runs, linked: set[str]) -> dict[str, Any]:
    """Rows and columns for the map and the table: one row a head, joined from all results."""
    joined = pd.DataFrame({"layer": [], "head": []}, dtype=int)
    units: dict[str, str] = {}
    for result in (runs.scan, runs.verdicts, runs.triggers):
        if result is not None:
            whole = result.confirmed if isinstance(result, TriggerReport) else result.frame
            fresh = [name for name in COLUMNS if name in whole and name not in joined]
            frame = whole.drop_duplicates(["layer", "head"])[["layer", "head", *fresh]]
            joined = joined.merge(frame, on=["layer", "head"], how="outer")
            units |= {name: UNITS.get(name) or result.units.get(name, "") for name in fresh}
    joined = joined.sort_values(["layer", "head"])[["layer", "head", *(name for name in COLUMNS if name in joined)]]
    columns = [
        {"key": name, "label": LABELS.get(name, name.replace("_", " ")), "unit": units[name],
         "text": not pd.api.types.is_numeric_dtype(joined[name])}
        for name in joined if name not in ("layer", "head")
    ]  # fmt: skip
    rows = [
        [int(row.layer), int(row["head"]), *(_plain(row[column["key"]]) for column in columns)]
        for _, row in joined.iterrows()
    ]
    scale = [hex_to_rgb(color) for color in getattr(sequential, MAP_SCALE)]
    return {"columns": columns, "rows": rows, "linked": sorted(linked), "scale": scale, "verdicts": VERDICT_COLORS}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return None
    return int(value) if float(value).is_integer() else round(float(value), 4)


def _summary(runs: Runs) -> str:
    # A reading is one line; what it says of single heads is easier to read as a list.
    sentences: list[str] = []
    for result in runs.results.values():
        parts = re.split(r"(?<=\.) (?=L\d)", result.reading())
        more = [f"... and {len(parts) - MOST_SAID} heads more."] if len(parts) > MOST_SAID else []
        sentences += [*parts[:MOST_SAID], *more]
    if runs.verdicts is not None:
        meanings = runs.verdicts.settings["meanings"]
        used = {*runs.verdicts.frame.verdict, "supports fully"}
        sentences += [f"“{name}”: {words}." for name, words in meanings.items() if name in used]
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul class='summary'>{items}</ul>"


def _note(runs: Runs, shown: int) -> str:
    tested = max((len(result.heads) for result in (runs.contrast, runs.verdicts) if result is not None), default=0)
    rest = "The numbers of the others are in the results' own files."
    return f"<p>{shown} of {tested} tested heads have a section. {rest}</p>" if tested > shown else ""


def _provenance(runs: Runs) -> str:
    parts = ["<section aria-labelledby='provenance'><h2 id='provenance'>Where the numbers come from</h2>"]
    caveats = runs.contrast.settings["caveats"] if runs.contrast is not None else []
    parts += ["<ul>", *(f"<li>{escape(caveat)}</li>" for caveat in caveats), "</ul>"] if caveats else []
    for kind, result in runs.results.items():
        facts = {**dict(_flat(result.provenance)), **dict(_flat(result.settings, "settings"))}
        rows = "".join(
            f"<tr><th scope='row'>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in facts.items()
        )
        parts.append(f"<details><summary>{kind}: made {escape(str(result.provenance['made']))}</summary>"
                     f"<div class='scroll'><table class='plain'>{rows}</table></div></details>")  # fmt: skip
    parts += [f"<p>Left out, because a newer result is there: {escape(str(path))}</p>" for path in runs.older]
    return "".join([*parts, "</section>"])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        elif key != "caveats":
            yield name, str(value)


def _part(name: str) -> str:
    return resources.files("sinklens.report").joinpath(name).read_text(encoding="utf-8")
