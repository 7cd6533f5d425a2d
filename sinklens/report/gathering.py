"""What lies in a folder: the newest result of each kind, in it or in the folders right below it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from sinklens.causal import Contrast, Verdicts
from sinklens.errors import InputError
from sinklens.scanning import SinkScan
from sinklens.table import HeadTable
from sinklens.triggers.report import TriggerReport
from sinklens.vocabulary import Head, Heads

KINDS: tuple[type[HeadTable], ...] = (SinkScan, Verdicts, TriggerReport, Contrast)
MOST_SECTIONS = 24
"""A page with more sections than this is read by nobody; the others are in the table."""


@dataclass(frozen=True, eq=False)
class Runs:
    """The results a page is made of.

    Attributes:
        results: The newest result of each kind, by kind; all of one model.
        toy: What ``sinklens toy reproduce`` measured, by set of models.
        toy_figures: Its figures.
        older: Results left out because a newer one of their kind is there.
    """

    results: Mapping[str, Any]
    toy: Mapping[str, Any] = field(default_factory=dict)
    toy_figures: tuple[Path, ...] = ()
    older: tuple[Path, ...] = ()

    @property
    def scan(self) -> SinkScan | None:
        return self.results.get("scan")

    @property
    def contrast(self) -> Contrast | None:
        return self.results.get("contrast")

    @property
    def verdicts(self) -> Verdicts | None:
        return self.results.get("verdicts")

    @property
    def triggers(self) -> TriggerReport | None:
        return self.results.get("triggers")

    @property
    def model(self) -> str:
        """The model's name."""
        return next((str(result.provenance["model"]) for result in self.results.values()), "toy models")

    def selected(self) -> Heads:
        """The heads that get a section: tested ones (supporting ones first), confirmed trigger heads, loudest sinks."""
        chosen: list[Head] = []
        if self.verdicts is not None:
            supports = self.verdicts.frame.verdict.str.startswith("supports")
            chosen += [*_heads(self.verdicts.frame[supports]), *_heads(self.verdicts.frame[~supports])]
        if self.contrast is not None:
            chosen += self.contrast.heads
        if self.triggers is not None:
            chosen += _heads(self.triggers.confirmed)[:12]
        if self.scan is not None:
            chosen += self.scan.top(3)
        return Heads(Heads.of(chosen)[:MOST_SECTIONS])


def _heads(frame: pd.DataFrame) -> list[Head]:
    return [Head(int(layer), int(head)) for layer, head in zip(frame.layer, frame["head"], strict=True)]


def gather(folder: str | Path) -> Runs:
    """Collect the results in a folder and in the folders right below it.

    Raises:
        InputError: No results, results of several models, or a file that cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError("a report is made of a folder of results", expected="a folder", got=folder)
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    results: dict[str, HeadTable] = {}
    older: list[Path] = []
    for kind in KINDS:
        found = [(_read(kind, place), place) for place in places if (place / f"{kind.kind}.json").is_file()]
        found.sort(key=lambda pair: str(pair[0].provenance["made"]))
        if found:
            results[kind.kind] = found[-1][0]
            older += [place / f"{kind.kind}.json" for _, place in found[:-1]]
    models = sorted({str(result.provenance["model"]) for result in results.values()})
    if len(models) > 1:
        raise InputError("a report is about one model", expected="results of one model", got=", ".join(models))
    toys = [place for place in places if (place / "statistics.json").is_file()]
    if not results and not toys:
        expected = "scan, contrast, verdicts, triggers or toy results, here or one folder below"
        raise InputError("no results here", expected=expected, got=folder)
    toy = json.loads((toys[0] / "statistics.json").read_text(encoding="utf-8")) if toys else {}
    figures = tuple(sorted(toys[0].glob("figure-*.svg"))) if toys else ()
    return Runs(results, toy, figures, tuple(older))


def _read(kind: type[HeadTable], place: Path) -> HeadTable:
    try:
        return kind.load(place)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise InputError("a result cannot be read", expected=f"what `save` wrote for a {kind.kind} result",
                         got=f"{place} ({reason})") from None  # fmt: skip
