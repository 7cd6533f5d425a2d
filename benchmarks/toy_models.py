"""What ships and what is written by hand, measured: tables and figures of ``docs/paper.md``.

Run: ``python benchmarks/toy_models.py``; under a minute, no training. The pictures need a renderer, see
:func:`sinklens.toy.figures.renderer`; without one the tables are still written.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from sinklens.toy import (
    BigramBackcopy,
    FactorialResult,
    TriggerTask,
    certify,
    constructions,
    draw_figure,
    load_record,
    names,
)
from sinklens.toy.constructions import Construction
from sinklens.toy.figures import NO_RENDERER, error_against_sink, renderer
from sinklens.toy.measuring import SeedInterval
from sinklens.toy.reports import markdown, put_between
from sinklens.toy.reproducing import FIGURES, summarize_set

SHAPES = ((16, 16), (4, 4), (5, 64), (32, 128))


def sets() -> Iterator[dict[str, Any]]:
    """The shipped models of the trigger task, all seeds."""
    for name in names():
        if name == "backcopy":
            continue
        found = summarize_set(name, load_record(name))
        yield {
            "set": name, "solved": f"{found.solved}/{found.seeds}", "steps": f"{found.steps:.0f}",
            "largest error": f"{found.error:.4f}", "BOS weight off": f"{found.off:.4f}",
            "BOS weight at": f"{found.at:.3f}", "heads parked off": f"{found.sinking.mean:.0%}",
            "heads parked at": f"{found.moved.mean:.0%}",
        }  # fmt: skip


def leaks() -> Iterator[dict[str, Any]]:
    """How often, and how much, trained ReLU heads look at BOS off the trigger, layer by layer."""
    batch = TriggerTask().sample(4000, Generator().manual_seed(1000))
    off = ~batch.at_trigger
    off[:, :2] = False
    for name in names():
        if not name.startswith("relu"):
            continue
        caches = [model.run_with_cache(batch.inputs)[1] for model in load_record(name).models()]
        for layer in range(load_record(name).config.n_layers):
            bos = torch.stack([c[f"blocks.{layer}.attn.hook_pattern"][..., 0].transpose(1, 2)[off] for c in caches])
            yield {
                "set": name, "layer": layer, "rows with any weight on BOS": f"{float((bos > 0).float().mean()):.2%}",
                "mean weight": f"{float(bos.mean()):.1g}", "largest": f"{float(bos.max()):.2g}",
            }  # fmt: skip


def by_hand() -> Iterator[dict[str, Any]]:
    """The constructions at several widths and lengths."""
    for n, length in SHAPES:
        task = TriggerTask(n, length)
        made: list[Construction] = constructions.everything(task)
        if length <= 4:
            made.append(constructions.softmax_sinkless(task))
        for one in made:
            check = one.check()
            yield {
                "construction": one.name, "n, L": f"{n}, {length}", "largest error": f"{check.reading.error:.1e}",
                "bound": f"{one.bound:.1e}", "BOS weight off, largest": f"{check.reading.highest_off.max():.3f}",
                "at": f"{check.reading.at.max():.3f}", "holds": "yes" if check.holds else "no",
            }  # fmt: skip


def language() -> Iterator[dict[str, Any]]:
    """The models of the token-level task on fresh sequences."""
    task, record = BigramBackcopy(), load_record("backcopy")
    batch = task.sample(1000, Generator().manual_seed(1000))
    at = batch.at_trigger[:, 2:]
    for seed, model, steps in zip(record.seeds, record.models(), record.steps, strict=True):
        with torch.no_grad():
            logits, cache = model.run_with_cache(batch.inputs)
        pattern = cache["blocks.0.attn.hook_pattern"][:, 0]
        before = pattern.diagonal(-1, dim1=1, dim2=2)[:, 1:]
        tokens, bos = batch.inputs[:, 2:], pattern[:, 2:, 0]
        awake = [word for token, word in enumerate(task.words()) if float(bos[tokens == token].mean()) < 0.5]
        yield {
            "seed": seed, "steps": int(steps),
            "loss above the chain's entropy, nats": f"{float(task.score(logits, batch, residual=True)[1]):.3f}",
            "BOS weight off": f"{float(pattern[:, 2:, 0][~at].mean()):.3f}",
            "BOS weight at": f"{float(pattern[:, 2:, 0][at].mean()):.1g}",
            "token before, off": f"{float(before[~at].mean()):.3f}",
            "token before, at": f"{float(before[at].mean()):.3f}", "tokens below .5 on BOS": ", ".join(awake),
        }  # fmt: skip


def certificates() -> Iterator[dict[str, Any]]:
    """Error and missing sink mass of every softmax set."""
    for name in names():
        if name.startswith("softmax"):
            found = certify(load_record(name))
            masses = [float(1 - reading.highest_off.max()) for reading in found.readings]
            yield {
                "set": name, "missing mass / error along training, largest": f"{found.worst:.2f}",
                "of the final models": f"{SeedInterval.of(found.final):.2f}",
                "some head sinks, every seed": "yes" if found.some_layer_sinks else "no",
                "missing mass of the strongest head": f"{max(masses):.1e}",
            }  # fmt: skip


def pictures(out: Path, tables: Path) -> None:
    """Figures of the paper and our own, as PNG."""
    draw = renderer()
    if draw is None:
        print(NO_RENDERER)
        return
    available = set(names())
    chosen = [number for number, plan in FIGURES.items() if set(plan.models) <= available]
    made = {f"paper-figure-{number}": draw_figure(number) for number in chosen}
    curves = {name: certify(load_record(name)).curve for name in ("softmax-1x1", "softmax-2x2")}
    made["paper-error-against-sink"] = error_against_sink(
        curves, title="Missing sink mass against error, along training", caption="One line a seed."
    )
    for size in ("1x1", "2x2"):
        if (tables / f"toy_factorial_{size}.json").exists():
            made[f"paper-factorial-{size}"] = FactorialResult.load(tables / f"toy_factorial_{size}.json").plot()
    out.mkdir(parents=True, exist_ok=True)
    draw([(figure, out / f"{name}.png") for name, figure in made.items()])
    print("drawn:", ", ".join(made))


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path, default=Path("docs/paper.md"))
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    parser.add_argument("--tables", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, rows in (
        ("sets", sets()), ("leaks", leaks()), ("constructions", by_hand()), ("certificates", certificates()),
        ("backcopy", language()),
    ):  # fmt: skip
        text = markdown(list(rows))
        put_between(arguments.page, name, text)
        print(text)
    pictures(arguments.figures, arguments.tables)


if __name__ == "__main__":
    main()
