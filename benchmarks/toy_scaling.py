"""How steps, sink weight and error move with length, width, heads and layers, and beyond the trained length.

Run: ``python benchmarks/toy_scaling.py``. Writes ``docs/benchmarks/toy_scaling.json`` and the tables between their
markers in ``docs/paper.md``. Learning rate 1e-3 in all cells, at most 4000 steps, three seeds but where a sequence is
long; an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from sinklens.normalizers import Normalizer, ReLU, Softmax
from sinklens.toy import TrainSettings, TriggerTask, load_record, read_task, train
from sinklens.toy.measuring import SeedInterval
from sinklens.toy.reports import markdown, put_between

SETTINGS = TrainSettings(lr=1e-3, max_steps=4000)
SEEDS = 3
FEWER = {64: 2, 128: 1}
"""Seeds of the lengths that cost most."""
NORMALIZERS: dict[str, Normalizer] = {"softmax": Softmax(), "relu / count": ReLU.paper()}
CASES: tuple[dict[str, int], ...] = (
    {"n": 6}, {"n": 32}, {"heads": 2}, {"length": 8}, {"length": 16}, {"length": 32}, {"length": 64}, {"heads": 4},
    {"layers": 2}, {"layers": 3}, {"length": 128},
)  # fmt: skip
"""Changes to the one-layer, one-head model of width 16 and length 16; the dearest last."""
LONGER = (16, 32, 64, 128, 256)


def case(name: str, changed: dict[str, int], folder: Path) -> dict[str, Any]:
    """Train one cell and measure it."""
    task = TriggerTask(n=changed.get("n", 16), length=changed.get("length", 16))
    layers, heads = changed.get("layers", 1), changed.get("heads", 1)
    seeds = FEWER.get(task.length, SEEDS)
    slug = f"{name.split()[0]}-" + "-".join(f"{key}{value}" for key, value in changed.items())
    record = train(task, normalizer=NORMALIZERS[name], layers=layers, heads=heads, seeds=range(seeds),
                   settings=SETTINGS, checkpoint=folder / f"{slug}.safetensors", progress=False)  # fmt: skip
    readings = [read_task(model, task, size=300) for model in record.models()]
    most = 1.0 if record.normalizer.shift_invariant else math.inf
    return {
        "weights": name,
        "changed": ", ".join(f"{key} {value}" for key, value in changed.items()),
        "solved": f"{int(record.solved.sum())}/{seeds}",
        "steps": format(SeedInterval.of(record.steps[record.solved]), ".0f"),
        "BOS weight off": format(SeedInterval.of([float(r.off.mean()) for r in readings], most=most), ".3f"),
        "heads parked off": f"{SeedInterval.of([r.parked('off the trigger') for r in readings]).mean:.0%}",
        "error": format(SeedInterval.of([r.error for r in readings]), ".4f"),
    }


def longer() -> list[dict[str, Any]]:
    """The shipped one-layer models on sequences longer than they were trained on."""
    rows = []
    for name in ("softmax-1x1", "relu-1x1"):
        for length in LONGER:
            task = TriggerTask(length=length)
            readings = [read_task(model, task, size=200) for model in load_record(name).models()]
            rows.append(
                {
                    "model": name,
                    "length": length,
                    "BOS weight off": format(SeedInterval.of([float(r.off.mean()) for r in readings]), ".4f"),
                    "error": format(SeedInterval.of([r.error for r in readings]), ".4f"),
                }
            )
    return rows


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--work", type=Path, default=Path("runs/toy/scaling"))
    parser.add_argument("--page", type=Path, default=Path("docs/paper.md"))
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many; the dearest come last")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    beyond = longer()
    put_between(arguments.page, "longer", markdown(beyond))
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for changed in CASES[: arguments.cases]:
        for name in NORMALIZERS:
            rows.append(case(name, changed, arguments.work))
            print(rows[-1], flush=True)
            content = json.dumps({"scaling": rows, "longer": beyond}, indent=1) + "\n"
            (arguments.out / "toy_scaling.json").write_text(content, encoding="utf-8")
            put_between(arguments.page, "scaling", markdown(rows))


if __name__ == "__main__":
    main()
