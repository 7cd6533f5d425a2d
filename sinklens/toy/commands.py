"""The command line of the toy room: draw the paper's figures, train a model; mounted as ``sinklens toy``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinklens.options import Out, Quiet

if TYPE_CHECKING:
    from sinklens.toy.task import TriggerTask
    from sinklens.toy.training import TrainRecord

app = typer.Typer(
    help="The paper's models from scratch: draw its figures, train your own.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
def reproduce(
    figure: Annotated[str, typer.Option(help="`3` to `8`, several as `3,4`, or `all`.", metavar="N")] = "all",
    out: Out = Path("runs/paper"),
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train the models first; interrupted runs go on where they stopped.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Draw figures 3 to 8 of the paper, with statistics over seeds.

    Example: `sinklens toy reproduce --figure 3 --out runs/paper`
    """
    from sinklens.toy.figures import NO_RENDERER, renderer
    from sinklens.toy.reproducing import reproduce as run

    chosen = figure if figure == "all" else [part.strip() for part in figure.split(",")]
    result = run(chosen, out, retrain=retrain, progress=not quiet)
    for statistics in result.statistics:
        typer.echo(statistics.plain())
    if renderer() is None:
        typer.echo(NO_RENDERER)
    kinds = ", ".join(sorted({path.suffix[1:] for path in result.files}))
    typer.echo(f"Wrote {len(result.figures)} figures ({kinds}) and statistics.json to {out}")


@app.command()
def train(
    weights: Annotated[
        str, typer.Option(help="How scores become weights: a cell of the factorial, e.g. `softmax`, `relu / count`.")
    ] = "softmax",
    layers: Annotated[int, typer.Option(help="Attention layers.")] = 1,
    heads: Annotated[int, typer.Option(help="Heads a layer.")] = 1,
    seeds: Annotated[int, typer.Option(help="Models trained at once, seeds counted from 0.")] = 1,
    n: Annotated[int, typer.Option("--n", help="Width of a token.")] = 16,
    length: Annotated[int, typer.Option(help="Sequence length, BOS included.")] = 16,
    lr: Annotated[
        float | None, typer.Option(help="Adam's rate; 1e-3 for one layer and 1e-4 for more by default.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Give up after this many.")] = 50_000,
    out: Out = Path("runs/toy"),
    quiet: Quiet = False,
) -> None:
    """Train models on the trigger task, and say where their heads park.

    An interrupted training goes on where it stopped when the same command is given again.

    Example: `sinklens toy train --weights "relu / count" --seeds 4 --out runs/toy`
    """
    from sinklens.errors import InputError
    from sinklens.table import writable
    from sinklens.toy.factors import cell_named
    from sinklens.toy.shipped import write_record
    from sinklens.toy.task import TriggerTask
    from sinklens.toy.training import TrainSettings
    from sinklens.toy.training import train as run

    if seeds < 1:
        raise InputError("a run has models", expected="seeds >= 1", got=seeds)
    cell = cell_named(weights)
    task, settings = TriggerTask(n, length), TrainSettings(lr=lr, max_steps=steps)
    name = f"{cell.slug}-{layers}x{heads}"
    record = run(
        task, normalizer=cell.normalizer, layers=layers, heads=heads, gated=cell.gated, learned_sink=cell.learned_sink,
        seeds=range(seeds), settings=settings, checkpoint=out / f"{name}.checkpoint", progress=not quiet,
    )  # fmt: skip
    with writable(out):
        write_record(record, out / f"{name}.safetensors")
    _say(record, task)
    typer.echo(f"Wrote {name}.safetensors and .json to {out}")


def _say(record: TrainRecord, task: TriggerTask) -> None:
    from sinklens.toy.measuring import Parking, read_task

    places: tuple[Parking, ...] = ("off the trigger", "at the trigger")
    for seed, model, steps, solved in zip(record.seeds, record.models(), record.steps, record.solved, strict=True):
        reading = read_task(model, task)
        heads = [f"{where} {reading.parked(where):.0%}" for where in places]
        typer.echo(
            f"seed {seed}: {'solved' if solved else 'not solved'} after {steps} steps; largest error "
            f"{reading.error:.4f} on fresh sequences; heads parked on BOS {', '.join(heads)}; "
            f"weight on BOS {reading.off.mean():.4f} off, {reading.at.mean():.4f} at"
        )
