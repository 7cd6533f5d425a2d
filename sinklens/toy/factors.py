"""The question the paper leaves open: is it the kernel, the normalization, or the hard zeros?

One cell is one way to turn scores into weights; task, shape, optimizer and stop rule are the same in all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklens.errors import InputError
from sinklens.normalizers import (
    DropSink,
    Entmax15,
    Normalizer,
    RenormalizeWithoutSink,
    Sigmoid,
    Softmax,
    SoftmaxPlusOne,
    Softpick,
    Sparsemax,
)
from sinklens.toy.kernels import ByCount, ByNothing, BySum, Exp, Factored, Hidden, Logistic, Rectified, RectifiedExp
from sinklens.toy.measuring import Parking, SeedInterval, read_task
from sinklens.toy.task import TriggerTask
from sinklens.toy.training import TrainRecord, TrainSettings, train

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Cell:
    """One cell of the factorial.

    Attributes:
        name: Its name.
        kernel: What is done to each score.
        normalization: What each row is divided by.
        hard_zeros: Whether a weight can be exactly 0.
        always_one: Whether every row sums to one, so that weight must go somewhere.
        normalizer: The map itself.
        gated: Whether head outputs are gated.
        learned_sink: Whether heads have a trained exit logit.
        hidden: Whether BOS is out of sight.
    """

    name: str
    kernel: str
    normalization: str
    hard_zeros: bool
    always_one: bool
    normalizer: Normalizer
    gated: bool = False
    learned_sink: bool = False
    hidden: bool = False

    @property
    def group(self) -> str:
        """What its rows add up to."""
        if self.always_one:
            return "always one"
        return "one, or all 0" if self.normalization.startswith("sum, 0/0") else "anything"

    @property
    def slug(self) -> str:
        """Its name with nothing but letters, digits and dashes, for files."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)


_EXP_BY_COUNT = Factored(Exp(), ByCount())
_LOGISTIC_BY_SUM, _LOGISTIC_BY_COUNT = Factored(Logistic(), BySum()), Factored(Logistic(), ByCount())

CELLS: tuple[Cell, ...] = (
    Cell("softmax", "exp", "sum", False, True, Softmax()),
    Cell("exp / count", "exp", "count", False, False, _EXP_BY_COUNT),
    Cell("exp", "exp", "none", False, False, Factored(Exp(), ByNothing())),
    Cell("sigmoid / sum", "sigmoid", "sum", False, True, _LOGISTIC_BY_SUM),
    Cell("sigmoid / count", "sigmoid", "count", False, False, _LOGISTIC_BY_COUNT),
    Cell("sigmoid", "sigmoid", "none", False, False, Factored(Logistic(), ByNothing())),
    Cell("relu / sum", "relu", "sum, 0/0 = 0", True, False, Factored(Rectified(), BySum())),
    Cell("relu / count", "relu", "count", True, False, Factored(Rectified(), ByCount())),
    Cell("relu", "relu", "none", True, False, Factored(Rectified(), ByNothing())),
    Cell("relu(exp-1) / sum", "relu(exp-1)", "sum, 0/0 = 0", True, False, Factored(RectifiedExp(), BySum())),
    Cell("relu(exp-1) / count", "relu(exp-1)", "count", True, False, Factored(RectifiedExp(), ByCount())),
    Cell("relu(exp-1)", "relu(exp-1)", "none", True, False, Factored(RectifiedExp(), ByNothing())),
    Cell("softpick", "relu(exp-1)", "sum abs(exp-1)", True, False, Softpick()),
    Cell("sigmoid, bias -log n", "sigmoid", "bias", False, False, Sigmoid()),
    Cell("softmax plus one", "exp", "1 + sum", False, False, SoftmaxPlusOne()),
    Cell("softmax, learned sink", "exp", "e^b + sum", False, False, Softmax(), learned_sink=True),
    Cell("softmax, gated output", "exp", "sum", False, True, Softmax(), gated=True),
    Cell("sparsemax", "projection", "sum", True, True, Sparsemax()),
    Cell("entmax 1.5", "projection", "sum", True, True, Entmax15()),
    Cell("softmax, BOS hidden", "exp", "sum", False, True, RenormalizeWithoutSink(), hidden=True),
    Cell(
        "sigmoid / sum, BOS hidden",
        "sigmoid",
        "sum",
        False,
        True,
        RenormalizeWithoutSink(_LOGISTIC_BY_SUM),
        hidden=True,
    ),
    Cell("exp / count, BOS hidden", "exp", "count", False, False, DropSink(_EXP_BY_COUNT), hidden=True),
    Cell("sigmoid / count, BOS hidden", "sigmoid", "count", False, False, DropSink(_LOGISTIC_BY_COUNT), hidden=True),
    Cell("softmax plus one, BOS hidden", "exp", "1 + sum", False, False, Hidden(SoftmaxPlusOne()), hidden=True),
)
"""Kernel x normalization (the first twelve), then published variants, two sparse maps that always sum to one, and five
cells without a BOS to look at: they tell a weight on BOS that is needed from one that is merely free."""


def cell_named(name: str) -> Cell:
    """A cell by its name.

    Raises:
        InputError: No cell of that name.
    """
    by_name = {cell.name: cell for cell in CELLS}
    if name not in by_name:
        raise InputError("no such cell", expected=f"one of {list(by_name)}", got=repr(name))
    return by_name[name]


@dataclass(frozen=True)
class CellResult:
    """A cell over its seeds; intervals are 95 % t intervals over seeds.

    Attributes:
        cell: Name of the cell.
        seeds: Models trained.
        solved: How many met the stop rule.
        steps: Steps taken by the solved ones.
        sink_rate: Share of heads with at least .3 of weight on BOS off the trigger.
        moved_rate: Share of heads parked on BOS at the trigger instead.
        off: Weight on BOS off the trigger, mean over heads.
        off_share: The same as a share of the row's sum.
        off_total: Sum of the rows off the trigger.
        at: Weight on BOS at the trigger.
        error: Largest error on 1000 fresh sequences.
    """

    cell: str
    seeds: int
    solved: int
    steps: SeedInterval
    sink_rate: SeedInterval
    moved_rate: SeedInterval
    off: SeedInterval
    off_share: SeedInterval
    off_total: SeedInterval
    at: SeedInterval
    error: SeedInterval

    @property
    def label(self) -> str:
        """Its name, with the count of solved seeds where it is not all of them."""
        return self.cell if self.solved == self.seeds else f"{self.cell} ({self.solved}/{self.seeds})"


@dataclass(frozen=True)
class FactorialResult:
    """The table, with what it was made under."""

    rows: tuple[CellResult, ...]
    settings: dict[str, Any] = field(repr=False)

    def markdown(self) -> str:
        """The table for the docs; unsolved models count in every column but ``steps``."""
        facts = {cell.name: cell for cell in CELLS}
        lines = [
            "| weights | kernel | divided by | hard zeros | always sums to one | solved | steps | heads sinking off "
            "the trigger | parked at the trigger | BOS weight off | share of the row | row sum off | BOS weight at | "
            "largest error |",
            "|---" * 14 + "|",
        ]
        for row in self.rows:
            cell = facts[row.cell]
            words = [cell.name, cell.kernel, cell.normalization, _yes(cell.hard_zeros), _yes(cell.always_one),
                     f"{row.solved}/{row.seeds}", format(row.steps, ".0f"), f"{row.sink_rate.mean:.0%}",
                     f"{row.moved_rate.mean:.0%}", format(row.off, ".3f"), format(row.off_share, ".3f"),
                     format(row.off_total, ".3f"), format(row.at, ".3f"), format(row.error, ".3f")]  # fmt: skip
            lines.append("| " + " | ".join(words) + " |")
        return "\n".join(lines) + "\n"

    def plot(self) -> go.Figure:
        """Share of each row's weight that lies on BOS off the trigger, grouped by what makes rows add up."""
        from sinklens.toy.figures import Bar, bars

        facts = {cell.name: cell for cell in CELLS}
        cells = [
            Bar(row.label, facts[row.cell].group, row.off.mean, row.off.low, row.off.high, row.solved == row.seeds)
            for row in self.rows
            if not facts[row.cell].hidden
        ]
        caption = (
            f"Bars: mean over {self.settings['seeds']} seeds with 95 % interval, {self.settings['size']} models. "
            "Pale, with a count: not every seed solved the task.<br>BOS has value 0 in a trained model, so weight "
            "on it is free where rows need not sum to one."
        )
        return bars(
            cells, title="Weight on BOS off the trigger", axis="weight on BOS, mean over rows and heads",
            legend="a row sums to", caption=caption,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the table as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) for row in self.rows]
        path.write_text(json.dumps({"settings": self.settings, "rows": rows}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> FactorialResult:
        """Read a table written by :meth:`save`."""
        content = json.loads(path.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = [
            {key: SeedInterval(**value) if isinstance(value, dict) else value for key, value in row.items()}
            for row in content["rows"]
        ]
        return cls(tuple(CellResult(**row) for row in rows), content["settings"])


def factorial(
    size: int = 1,
    *,
    seeds: int = 8,
    settings: TrainSettings | None = None,
    cells: Iterable[str] | None = None,
    task: TriggerTask | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> FactorialResult:
    """Train every cell from several seeds and measure where its weight goes.

    Args:
        size: Layers, and heads a layer.
        seeds: Models a cell, seeds counted from 0.
        settings: How to train; by default the paper's, but at most 10,000 steps, and 1e-3 for any number of layers.
        cells: Names of :data:`CELLS`; all by default.
        task: What to learn; the paper's by default.
        folder: Checkpoints: an interrupted run goes on, a finished cell is not trained again.
        progress: Show bars.

    Raises:
        InputError: An unknown cell, or checkpoints of other settings.
    """
    settings = settings or TrainSettings(lr=1e-3, max_steps=10_000)
    task = task or TriggerTask()
    chosen = CELLS if cells is None else [cell_named(name) for name in cells]
    rows = []
    for cell in chosen:
        record = train(
            task, normalizer=cell.normalizer, layers=size, heads=size, gated=cell.gated,
            learned_sink=cell.learned_sink, seeds=range(seeds), settings=settings, progress=progress,
            checkpoint=None if folder is None else Path(folder) / f"{size}x{size}-{cell.slug}.safetensors",
        )  # fmt: skip
        rows.append(summarize(cell.name, record, task))
    about = {"size": f"{size}x{size}", "seeds": seeds, "task": task.settings(), "training": asdict(settings)}
    return FactorialResult(tuple(rows), about)


def summarize(name: str, record: TrainRecord, task: TriggerTask) -> CellResult:
    """Measure a cell's models on fresh sequences."""
    readings = [read_task(model, task) for model in record.models()]

    def over(values: Sequence[float] | np.ndarray, most: float = math.inf) -> SeedInterval:
        return SeedInterval.of([float(value) for value in values], most=most)

    def heads(attribute: str, most: float = math.inf) -> SeedInterval:
        return over([getattr(reading, attribute).mean() for reading in readings], most)

    def parked(where: Parking) -> SeedInterval:
        return over([reading.parked(where) for reading in readings], 1.0)

    # Rounding may push a share of a row past 1 in the last digit.
    most = 1.0 + 1e-6 if cell_named(name).group != "anything" else math.inf

    return CellResult(
        name, len(readings), int(record.solved.sum()), over(record.steps[record.solved]), parked("off the trigger"),
        parked("at the trigger"), heads("off", most), heads("off_share", 1.0 + 1e-6), heads("off_total"),
        heads("at", most), over([reading.error for reading in readings]),
    )  # fmt: skip


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
