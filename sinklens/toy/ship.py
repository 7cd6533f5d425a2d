"""Train the models that come with the package: ``python -m sinklens.toy.ship``.

Each recipe trains into a checkpoint under ``--work`` and can be interrupted; finished ones are not trained again. The
results are written to ``sinklens/toy/weights`` as one small safetensors file a recipe, all its seeds in it, with the
curves and the provenance in a JSON file beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklens.errors import InputError
from sinklens.normalizers import Normalizer, ReLU, Softmax
from sinklens.toy.backcopy import BigramBackcopy
from sinklens.toy.shipped import FOLDER, write_record
from sinklens.toy.task import TriggerTask
from sinklens.toy.training import Task, TrainRecord, TrainSettings, train


@dataclass(frozen=True)
class Recipe:
    """How one shipped set of models is trained.

    Attributes:
        task: What they learn.
        normalizer: Scores to weights.
        layers: Attention layers.
        heads: Heads a layer.
        seeds: How many seeds, counted from 0.
        settings: How to train.
    """

    task: Task
    normalizer: Normalizer
    layers: int
    heads: int
    seeds: int
    settings: TrainSettings = TrainSettings()

    def train(self, checkpoint: Path, *, progress: bool = True) -> TrainRecord:
        """Train, or go on from the checkpoint."""
        return train(
            self.task, normalizer=self.normalizer, layers=self.layers, heads=self.heads, seeds=range(self.seeds),
            settings=self.settings, checkpoint=checkpoint, progress=progress,
        )  # fmt: skip


RECIPES: dict[str, Recipe] = {
    "softmax-1x1": Recipe(TriggerTask(), Softmax(), 1, 1, 8),
    "relu-1x1": Recipe(TriggerTask(), ReLU.paper(), 1, 1, 8),
    "softmax-2x2": Recipe(TriggerTask(), Softmax(), 2, 2, 4),
    "relu-2x2": Recipe(TriggerTask(), ReLU.paper(), 2, 2, 4),
    "softmax-4x4": Recipe(TriggerTask(), Softmax(), 4, 4, 2),
    "relu-4x4": Recipe(TriggerTask(), ReLU.paper(), 4, 4, 2),
    "backcopy": Recipe(
        BigramBackcopy(), Softmax(), 1, 1, 2, TrainSettings(lr=5e-4, max_steps=8000, tolerance=1e-2, record_every=50)
    ),
}
"""The paper's presets and the token-level task; the 2x2 and 4x4 models train for many minutes."""


def ship(names: Sequence[str], work: Path, out: Path = FOLDER, *, progress: bool = True) -> list[Path]:
    """Train recipes and write their weights.

    Args:
        names: Which recipes.
        work: Folder of the checkpoints.
        out: Folder of the weights.
        progress: Show bars.

    Returns:
        The files written.

    Raises:
        InputError: An unknown name.
    """
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise InputError("no such recipe", expected=f"some of {list(RECIPES)}", got=unknown)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        record = RECIPES[name].train(work / f"{name}.safetensors", progress=progress)
        file = out / f"{name}.safetensors"
        write_record(record, file)
        written.append(file)
    return written


def main() -> None:
    """Parse the command line and ship."""
    parser = argparse.ArgumentParser(prog="python -m sinklens.toy.ship", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(RECIPES), help="recipes; all by default")
    parser.add_argument("--work", type=Path, default=Path("runs/toy"), help="folder of the checkpoints")
    arguments = parser.parse_args()
    ship(arguments.names, arguments.work)


if __name__ == "__main__":
    main()
