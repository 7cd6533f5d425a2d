"""The command ``sinklens triggers``: which tokens wake which heads; mounted by :mod:`sinklens.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinklens.options import BackendName, Device, Dtype, Length, ModelName, Out, Prompts, Quiet, Revision, Seed

if TYPE_CHECKING:
    from sinklens.triggers.report import TriggerReport


def triggers(
    model: ModelName,
    out: Out = Path("runs/triggers"),
    prompts: Prompts = "builtin",
    n: Annotated[int | None, typer.Option("--n", help="How many sequences, at least 60; all by default.")] = None,
    length: Length = 256,
    checks: Annotated[int, typer.Option(help="How many sets the counterfactual check takes up; 0: none.")] = 20,
    function: Annotated[int, typer.Option(help="How many of the best explained heads to ablate too (slow).")] = 0,
    backend: BackendName = "hf",
    device: Device = "cpu",
    dtype: Dtype = None,
    revision: Revision = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Find heads that sleep on the sink until some tokens wake them, or that park when some come.

    Triggers are named on half of the sequences and confirmed on the other half.

    Example: `sinklens triggers demo --out runs/triggers`
    """
    from sinklens.errors import InputError
    from sinklens.models import load, prompts_named
    from sinklens.triggers.finding import find_triggers
    from sinklens.triggers.showing import page_of
    from sinklens.triggers.study import Protocol

    if min(checks, function) < 0:
        raise InputError("checks are counted", expected="0 or more", got=min(checks, function))
    network, tokenizer = load(model, dtype=dtype, revision=revision, device=device, backend=backend)
    chosen = prompts_named(prompts, network, tokenizer, length=length, count=n, seed=seed)
    report = find_triggers(network, chosen, protocol=Protocol(checks=checks, seed=seed), counterfactual=checks > 0,
                           function=function, progress=not quiet)  # fmt: skip
    report.save(out)
    figure = "" if report.confirmed.empty else report.plot().to_html(full_html=False, include_plotlyjs=True)
    page_of(report, figure).save(out / "triggers.html")
    _show(report, out)


def _show(report: TriggerReport, out: Path) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from sinklens.vocabulary import Head

    console = Console()
    # Narrow enough that a terminal of 80 columns leaves room for the words.
    table = Table(
        title="Trigger sets, best explained first", title_justify="left", box=SIMPLE, padding=0, pad_edge=False
    )
    for name in ("head", "trigger", "asleep", "risk difference", "grade"):
        table.add_column(name, no_wrap=name != "trigger")
    for _, row in report.confirmed.head(20).iterrows():
        table.add_row(f"{Head(int(row.layer), int(row['head']))} {row.direction}", row.trigger,
                      f"{row.dormant_fraction:.2f}", f"{row.risk_difference:.2f} [{row.low:.2f}, {row.high:.2f}]",
                      row.grade)  # fmt: skip
    if table.rows:
        console.print(table, markup=False)
    console.print(report.reading(), markup=False, soft_wrap=True)
    console.print(f"Wrote triggers.parquet, triggers.json and triggers.html to {out}", markup=False, soft_wrap=True)
