"""The commands ``sinklens screen`` and ``sinklens desink``; mounted by :mod:`sinklens.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinklens.options import Count, Device, Dtype, Found, Length, ModelName, Out, Prompts, Quiet, Revision, Seed


def screen(
    model: ModelName,
    out: Out = Path("runs/screen"),
    prompts: Prompts = "builtin",
    n: Count = 16,
    length: Length = 128,
    draws: Annotated[int, typer.Option(help="Labels drawn for each token; each costs a backward pass.")] = 1,
    device: Device = "cpu",
    dtype: Dtype = None,
    revision: Revision = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Estimate what every intervention would do at every head, from one backward pass a batch.

    Example: `sinklens screen demo --out runs/screen`
    """
    from rich.console import Console

    from sinklens.causal.screening import screen as run
    from sinklens.cli import save
    from sinklens.models import load, prompts_named

    network, tokenizer = load(model, dtype=dtype, revision=revision, device=device)
    chosen = prompts_named(prompts, network, tokenizer, length=length, count=n, seed=seed)
    found = run(network, chosen, draws=draws, seed=seed, progress=not quiet)
    save(found, out, found.plot())
    Console(soft_wrap=True).print(found.reading(), f"Wrote screening.parquet, .json and .html to {out}", sep="\n")


def desink(
    model: ModelName,
    out: Found,
    prompts: Prompts = "builtin",
    second: Annotated[str | None, typer.Option(help="Text of a second kind, named like --prompts.")] = None,
    n: Count = 16,
    length: Length = 128,
    budget: Annotated[float, typer.Option(help="Share of the loss that the recipe may cost.")] = 0.01,
    min_mass: Annotated[float, typer.Option(help="Mean mass on the sink from which a head is changed.")] = 0.3,
    device: Device = "cpu",
    dtype: Dtype = None,
    revision: Revision = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Take the sink from every head whose verdict allows it, and write the recipe that stays within a budget.

    Example: `sinklens desink demo --out runs/verdicts --prompts held-out.txt --second builtin`
    """
    from rich.console import Console

    from sinklens.causal import Contrast
    from sinklens.causal import desink as run
    from sinklens.cli import save
    from sinklens.errors import InputError
    from sinklens.models import load, prompts_named
    from sinklens.scanning import scan

    if budget < 0:
        raise InputError("a budget is a share of the loss", expected="0 or more", got=budget)
    contrast = Contrast.load(out)
    network, tokenizer = load(model, dtype=dtype, revision=revision, device=device)
    chosen = prompts_named(prompts, network, tokenizer, length=length, count=n, seed=seed)
    other = None if second is None else prompts_named(second, network, tokenizer, length=length, count=n, seed=seed)
    sinks = scan(network, chosen, outputs=False, progress=not quiet)
    found = run(network, sinks, contrast, chosen, second=other, min_mass=min_mass, seed=seed, progress=not quiet)
    save(found, out, found.plot())
    count = found.within(budget)
    path = found.recipe(count).save(out / "recipe.json")
    console = Console(soft_wrap=True)
    console.print(found.reading(), f"Wrote desinking (.parquet, .json, .html) and a recipe of {count} heads: {path}",
                  sep="\n")  # fmt: skip
