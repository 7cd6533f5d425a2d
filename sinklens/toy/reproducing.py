"""Figures 3 to 8 of arXiv 2603.11487 from one call, with the statistics that the paper leaves out beside them.

Figure 3: one layer, mean pattern over 1000 sequences; 4: one layer, a single sequence; 5 and 6: two layers of two
heads, softmax and ReLU; 7 and 8: four layers of four heads, softmax and ReLU; single sequences. The trigger stands at
index 7.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklens.errors import InputError
from sinklens.table import writable
from sinklens.toy.measuring import SeedInterval, read_task
from sinklens.toy.shipped import load_record
from sinklens.toy.task import TriggerTask
from sinklens.toy.training import TrainRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from sinklens.toy.figures import Panel

TRIGGER = 7
"""The paper's trigger position, 8 counted from 1."""
MANY = 1000


@dataclass(frozen=True)
class Plan:
    """What one figure shows.

    Attributes:
        title: Its title.
        models: Which trained sets, one panel grid or one panel each.
        sequences: How many sequences the drawn pattern is a mean over.
    """

    title: str
    models: tuple[str, ...]
    sequences: int


FIGURES: dict[int, Plan] = {
    3: Plan("One layer, one head: mean attention over 1000 sequences", ("softmax-1x1", "relu-1x1"), MANY),
    4: Plan("One layer, one head: one sequence", ("softmax-1x1", "relu-1x1"), 1),
    5: Plan("Two layers of two softmax heads: one sequence", ("softmax-2x2",), 1),
    6: Plan("Two layers of two ReLU heads: one sequence", ("relu-2x2",), 1),
    7: Plan("Four layers of four softmax heads: one sequence", ("softmax-4x4",), 1),
    8: Plan("Four layers of four ReLU heads: one sequence", ("relu-4x4",), 1),
}


@dataclass(frozen=True)
class SetStatistics:
    """All seeds of a trained set on 1000 fresh sequences; intervals are 95 % t intervals over seeds.

    Attributes:
        models: Name of the set.
        seeds: How many models.
        solved: How many met the stop rule.
        steps: Steps they took.
        off: Weight on BOS off the trigger, mean over heads.
        at: Weight on BOS in the trigger's row.
        sinking: Share of heads parked on BOS off the trigger.
        moved: Share of heads parked on BOS at the trigger.
        error: Largest error.
    """

    models: str
    seeds: int
    solved: int
    steps: SeedInterval
    off: SeedInterval
    at: SeedInterval
    sinking: SeedInterval
    moved: SeedInterval
    error: SeedInterval

    def plain(self) -> str:
        """The statistics in one line for a terminal."""
        return self.sentence().replace("<br> ", "").replace("<b>", "").replace("</b>", "")

    def sentence(self) -> str:
        """The statistics in two lines for a caption."""
        return (
            f"<b>{self.models}</b>: {self.solved} of {self.seeds} seeds solved in {self.steps:.0f} steps; "
            f"largest error {self.error:.4f};<br>  BOS weight off the trigger {self.off:.4f}, at it {self.at:.3f}; "
            f"heads parked off it {self.sinking.mean:.0%}, at it {self.moved.mean:.0%}"
        )


@dataclass(frozen=True, eq=False)
class Reproduction:
    """What :func:`reproduce` made.

    Attributes:
        figures: The figures by number.
        statistics: The statistics of every set drawn.
        files: Files written.
        settings: Provenance of each set.
    """

    figures: dict[int, go.Figure] = field(repr=False)
    statistics: tuple[SetStatistics, ...]
    files: tuple[Path, ...]
    settings: dict[str, Any] = field(repr=False)


def reproduce(
    figures: Iterable[int | str] | int | str = "all",
    out: str | Path = "runs/paper",
    *,
    retrain: bool = False,
    progress: bool = True,
) -> Reproduction:
    """Draw the paper's figures from the shipped models, or from models trained on the spot.

    Args:
        figures: Numbers in 3..8, or ``"all"``.
        out: Folder for HTML, for PNG, SVG and PDF where a renderer is installed, and for ``statistics.json``.
        retrain: Train the models first, into ``out/checkpoints``; an interrupted training goes on where it stopped.
            One layer takes seconds; 2x2 and 4x4 take tens of minutes a set on one core.
        progress: Show bars.

    Raises:
        InputError: A figure that is none of these, or a folder that cannot be written.
    """
    from sinklens.toy.figures import write

    numbers = _numbers(figures)
    folder = Path(out)
    with writable(folder):
        pass  # before anything is trained
    sets = sorted({name for number in numbers for name in FIGURES[number].models})
    records = {name: _record(name, folder, retrain, progress) for name in sets}
    statistics = {name: summarize_set(name, record) for name, record in records.items()}
    drawn = {number: draw(FIGURES[number], records, statistics) for number in numbers}
    settings = {name: record.settings for name, record in records.items()}
    with writable(folder):
        _write_statistics(folder, statistics, settings)
        files = write({f"figure-{number}": figure for number, figure in drawn.items()}, folder)
    return Reproduction(drawn, tuple(statistics.values()), tuple(files), settings)


def _numbers(figures: Iterable[int | str] | int | str) -> list[int]:
    if figures == "all":
        return list(FIGURES)
    given = [figures] if isinstance(figures, int | str) else list(figures)
    numbers = [int(number) if str(number).isdigit() else -1 for number in given]
    if not numbers or any(number not in FIGURES for number in numbers):
        raise InputError("no such figure", expected=f"'all' or some of {list(FIGURES)}", got=figures)
    return numbers


def _record(name: str, folder: Path, retrain: bool, progress: bool) -> TrainRecord:
    if not retrain:
        return load_record(name)
    from sinklens.toy.ship import RECIPES

    return RECIPES[name].train(folder / "checkpoints" / f"{name}.safetensors", progress=progress)


def summarize_set(name: str, record: TrainRecord) -> SetStatistics:
    """Measure all seeds of a trained set on fresh sequences with triggers everywhere."""
    readings = [read_task(model, TriggerTask(), size=MANY) for model in record.models()]

    def over(values: list[float], most: float = math.inf) -> SeedInterval:
        return SeedInterval.of(values, most=most)

    # The rows of a shift-invariant map sum to one.
    most = 1.0 if record.normalizer.shift_invariant else math.inf
    return SetStatistics(
        name, len(readings), int(record.solved.sum()), SeedInterval.of(record.steps[record.solved]),
        over([float(r.off.mean()) for r in readings], most), over([float(r.at.mean()) for r in readings], most),
        over([r.parked("off the trigger") for r in readings], 1.0),
        over([r.parked("at the trigger") for r in readings], 1.0), over([r.error for r in readings]),
    )  # fmt: skip


def draw_figure(number: int) -> go.Figure:
    """One figure of the paper from the shipped models, written nowhere.

    Raises:
        InputError: A figure that is none of 3..8.
    """
    (number,) = _numbers(number)
    records = {name: load_record(name) for name in FIGURES[number].models}
    return draw(FIGURES[number], records, {name: summarize_set(name, record) for name, record in records.items()})


def draw(plan: Plan, records: Mapping[str, TrainRecord], statistics: Mapping[str, SetStatistics]) -> go.Figure:
    """Draw one figure from the first seed of each set."""
    from sinklens.toy.figures import pattern_grid

    grids = [_panels(records[name], plan.sequences, name) for name in plan.models]
    panels = [[grid[0][0] for grid in grids]] if len(grids) > 1 else grids[0]
    caption = "<br>".join([*(statistics[name].sentence() for name in plan.models), _KEY])
    return pattern_grid(panels, title=f"{plan.title}, trigger at {TRIGGER}", caption=caption, trigger=TRIGGER)


def _panels(record: TrainRecord, sequences: int, name: str) -> list[list[Panel]]:
    from sinklens.toy.figures import Panel

    model, task = record.model(0), TriggerTask()
    drawn = read_task(model, task, size=sequences, trigger=TRIGGER)
    many = read_task(model, task, size=MANY, trigger=TRIGGER)
    parking = many.parking()
    single = parking.size == 1

    def title(layer: int, head: int) -> str:
        place = name if single else f"L{layer}H{head}"
        return (
            f"{place}: BOS {many.off[layer, head]:.2f} off, {many.at[layer, head]:.2f} at{_sign(parking[layer, head])}"
        )

    layers, heads = parking.shape
    return [[Panel(title(i, j), np.asarray(drawn.pattern[i, j])) for j in range(heads)] for i in range(layers)]


_KEY = "Drawn: the first seed. Titles: BOS weight over 1000 sequences; (+) parked on BOS off the trigger, (-) at it."


def _sign(parking: str) -> str:
    return {"off the trigger": " (+)", "at the trigger": " (-)"}.get(parking, "")


def _write_statistics(folder: Path, statistics: Mapping[str, SetStatistics], settings: Mapping[str, Any]) -> None:
    content = {name: {**asdict(values), "settings": settings[name]} for name, values in statistics.items()}
    (folder / "statistics.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
