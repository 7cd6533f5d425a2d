"""The trained models that come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from sinklens.errors import InputError
from sinklens.normalizers import Normalizer, ReLU, Softmax
from sinklens.toy.model import ToyConfig, ToyTransformer
from sinklens.toy.training import TrainRecord

FOLDER = Path(__file__).parent / "weights"
_KNOWN: tuple[Normalizer, ...] = (Softmax(), ReLU.paper())
_CURVE_POINTS = 80


def describe(record: TrainRecord) -> dict[str, Any]:
    """A record without its weights, as plain values, with thinned curves."""
    curves = {}
    for seed, curve in record.curves.items():
        kept = np.unique(np.linspace(0, len(curve) - 1, _CURVE_POINTS).round().astype(int))
        curves[str(seed)] = [[float(f"{value:.6g}") for value in row] for row in curve[kept]]
    return {
        "settings": record.settings,
        "steps": record.steps.tolist(),
        "solved": record.solved.tolist(),
        "error": record.error.tolist(),
        "curves": curves,
    }


def write_record(record: TrainRecord, file: Path) -> None:
    """Write weights as safetensors, and curves and provenance as JSON beside them."""
    save_file({key: weight.contiguous() for key, weight in record.weights.items()}, file)
    file.with_suffix(".json").write_text(json.dumps(describe(record), indent=1) + "\n", encoding="utf-8")


def names() -> tuple[str, ...]:
    """What can be loaded."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.safetensors")))


def load_record(name: str) -> TrainRecord:
    """All seeds of a shipped set, with curves and provenance.

    Raises:
        InputError: No set of that name.
    """
    if name not in names():
        raise InputError("no such trained model", expected=f"one of {names()}", got=repr(name))
    about = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    settings = about["settings"]
    normalizer = {repr(known): known for known in _KNOWN}[settings["normalizer"]]
    return TrainRecord(
        ToyConfig(**settings["config"]), normalizer, tuple(settings["seeds"]), np.array(about["steps"]),
        np.array(about["solved"]), np.array(about["error"]), load_file(FOLDER / f"{name}.safetensors"),
        {int(seed): np.array(rows) for seed, rows in about["curves"].items()}, settings,
    )  # fmt: skip


def load(name: str, seed: int = 0) -> ToyTransformer:
    """A trained toy model by name, such as ``softmax-1x1``, ``relu-2x2`` or ``backcopy``.

    Raises:
        InputError: No such set, or no such seed in it.
    """
    record = load_record(name)
    if seed not in record.seeds:
        raise InputError(f"{name} has no such seed", expected=f"one of {record.seeds}", got=seed)
    return record.model(record.seeds.index(seed))
