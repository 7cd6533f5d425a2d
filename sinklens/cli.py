"""The command line: parse, call, print. Every library error becomes one sentence and exit code 2."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sinklens.causal.commands import desink, screen
from sinklens.options import BackendName, Count, Device, Dtype, Length, ModelName, Out, Prompts, Quiet, Revision, Seed
from sinklens.report.commands import report
from sinklens.toy.commands import app as toy
from sinklens.triggers.commands import triggers

if TYPE_CHECKING:
    from sinklens.causal import Contrast, Verdicts
    from sinklens.prompts import PromptSet
    from sinklens.scanning import SinkScan
    from sinklens.table import HeadTable
    from sinklens.triggers import TriggerReport
    from sinklens.vocabulary import Heads

app = typer.Typer(
    help="Shows why attention heads park their weight on a meaningless token, and tests it on real heads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.command()
def scan(
    model: ModelName,
    out: Out = Path("runs/scan"),
    prompts: Prompts = "builtin",
    n: Count = None,
    length: Length = 256,
    sinks: Annotated[float, typer.Option(help="Mass from which a head is listed as a sink.")] = 0.5,
    gu: Annotated[bool, typer.Option("--gu", help="Count every row, as the published sink rate does.")] = False,
    max_gib: Annotated[float | None, typer.Option(help="Refuse to start above this estimated memory.")] = None,
    backend: BackendName = "hf",
    device: Device = "cpu",
    dtype: Dtype = None,
    revision: Revision = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Find the sink heads of a model.

    Example: `sinklens scan demo --n 16 --length 128 --out runs/scan`
    """
    from sinklens.measures import SinkRule
    from sinklens.models import load, prompts_named
    from sinklens.scanning import scan as run

    network, tokenizer = load(model, dtype=dtype, revision=revision, device=device, backend=backend)
    chosen = prompts_named(prompts, network, tokenizer, length=length, count=n, seed=seed)
    limit_bytes = None if max_gib is None else int(max_gib * 2**30)
    rule = SinkRule.gu() if gu else SinkRule()
    result = run(network, chosen, rule=rule, max_bytes=limit_bytes, progress=not quiet)
    _show_scan(result, out, sinks)


@app.command()
def contrast(
    model: ModelName,
    heads: Annotated[
        str,
        typer.Option(
            help="`all`, `top:N` by sink mass, `triggers` found in DIR, heads like `L18H8`; several with commas."
        ),
    ] = "top:3",
    full: Annotated[
        bool, typer.Option("--full", help="Every intervention, fits, and a verdict; goes on after a kill.")
    ] = False,
    together: Annotated[bool, typer.Option("--together", help="Also change the heads all at once.")] = False,
    layers: Annotated[str, typer.Option(help="Also change whole layers, e.g. `18,25`.")] = "",
    out: Out = Path("runs/contrast"),
    prompts: Prompts = "builtin",
    n: Count = 16,
    length: Length = 128,
    backend: BackendName = "hf",
    device: Device = "cpu",
    dtype: Dtype = None,
    revision: Revision = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Change heads in ten ways and measure what the model's predictions lose.

    Example: `sinklens contrast demo --heads L18H8,L20H8 --out runs/contrast`
    """
    from sinklens.models import load, prompts_named

    asked = _Asked.parse(heads, layers, out)
    network, tokenizer = load(model, dtype=dtype, revision=revision, device=device, backend=backend)
    chosen = prompts_named(prompts, network, tokenizer, length=length, count=n, seed=seed)
    _contrast(network, chosen, asked, together, out, seed, quiet, full=full)


@app.command()
def demo(out: Out = Path("runs/demo"), quiet: Quiet = False) -> None:
    """The main job on SmolLM2-135M: find its sink heads, then take their sinks away.

    Example: `sinklens demo --out runs/demo`
    """
    from sinklens.models import load
    from sinklens.prompts import PromptSet
    from sinklens.scanning import scan as run

    network, tokenizer = load("demo")
    found = run(network, PromptSet.builtin(tokenizer, length=128, limit=32), progress=not quiet)
    _show_scan(found, out, 0.75)
    # The loudest sink, and three heads that sleep on it until " and", the end of a sentence, or a digit comes.
    prompts = PromptSet.builtin(tokenizer, length=128, limit=16)
    _contrast(network, prompts, _Asked.parse("L18H8,L20H8,L15H0,L25H8", "", out), True, out, 0, quiet)


app.command()(screen)
app.command()(desink)
app.command()(triggers)
app.command()(report)
app.add_typer(toy, name="toy")


_MOST_IN_FULL = 40
"""With more heads than this, `--full` runs only what a verdict needs."""


def _contrast(model: Any, prompts: PromptSet, asked: _Asked, together: bool, out: Path, seed: int, quiet: bool, *,
              full: bool = False) -> None:  # fmt: skip
    from sinklens.causal import CORE, FULL
    from sinklens.causal import contrast as run

    chosen = asked.heads(model, prompts, quiet)
    sets: list[Heads | int] = [chosen] if together and len(chosen) > 1 else []
    sets += asked.layers
    many = full and len(chosen) > _MOST_IN_FULL
    which = () if many else FULL if full else CORE
    if many:
        _say(f"{len(chosen)} heads: changed state by state, for a verdict ({_MOST_IN_FULL} at most get everything)")
    journal = out / "contrast.journal.jsonl" if full else None
    result = run(model, prompts, chosen, sets=sets, interventions=which, judge=full, controls=not many,
                 triggers=asked.triggers, journal=journal, seed=seed, progress=not quiet)  # fmt: skip
    save(result, out, result.plot())
    if full:
        verdicts = result.verdicts()
        save(verdicts, out, verdicts.plot())
        _verdicts(verdicts)
    else:
        _effects(result)
    interventions = result.settings["interventions"]
    for line in (*result.settings["remarks"], *result.settings["caveats"]):
        _say(f"- {line}")
    names = "contrast and verdicts" if full else "contrast"
    _say(f"Wrote {names} (.parquet, .json, .html) to {out}: {len(interventions)} interventions, KL, loss, output error")


def _verdicts(result: Verdicts) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    # Narrow enough that a terminal of 80 columns shows the verdict; reasons and intervals are in the files.
    table = Table(title="Verdicts; KL in nats a token, changed at that state's tokens only", title_justify="left",
                  box=SIMPLE, padding=(0, 1), pad_edge=False, collapse_padding=True)  # fmt: skip
    for name in ("head", "dormant", "active", "Z dorm.", "Z act.", "log C2/C1", "E4", "p Holm"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for head, (_, row) in zip(result.heads, result.frame.iterrows(), strict=True):
        numbers = (_number(row[name]) for name in ("z_dormant", "z_active"))
        ratios = ("-" if row[name] != row[name] else f"{row[name]:.2f}" for name in ("log_ratio", "e4", "p_holm"))
        table.add_row(str(head), f"{row.dormant:.0%}", f"{row.active:.0%}", *numbers, *ratios, row.verdict)
    _say(table)
    _say(result.reading())


def _number(value: float) -> str:
    return "-" if value != value else _short(value)


@dataclass(frozen=True)
class _Asked:
    """What `--heads` and `--layers` say; nonsense is told before a model is loaded.

    Attributes:
        parts: `all`, a count of the heads with the most sink mass, or heads by name, in the order they were written.
        layers: Whole layers.
        triggers: The report whose heads are asked for.
    """

    parts: tuple[Heads | int | Literal["all"], ...]
    layers: tuple[int, ...]
    triggers: TriggerReport | None

    @classmethod
    def parse(cls, heads: str, layers: str, out: Path) -> _Asked:
        from sinklens.errors import InputError
        from sinklens.triggers import TriggerReport
        from sinklens.vocabulary import Heads

        if not all(part.strip().isdigit() for part in layers.split(",") if layers):
            raise InputError("layers are numbers", expected="e.g. --layers 18,25", got=layers)
        parts: list[Heads | int | Literal["all"]] = []
        triggers = None
        for text in map(str.strip, heads.split(",")):
            if text == "all":
                parts.append("all")
            elif text == "triggers":
                triggers = TriggerReport.load(out)
                parts.append(Heads.of(dict.fromkeys(triggers.graded("strict", "graded"))))
                if not parts[-1]:
                    raise InputError("no trigger head to test", expected=f"strict or graded heads in {out}", got="none")
            elif text.startswith("top:"):
                count = text.removeprefix("top:")
                if not count.isdigit() or int(count) < 1:
                    raise InputError("`top:` takes a count", expected="top:1 or more", got=text)
                parts.append(int(count))
            else:
                parts.append(Heads.of(text))
        return cls(tuple(parts), tuple(int(part) for part in layers.split(",") if layers), triggers)

    def heads(self, model: Any, prompts: PromptSet, quiet: bool) -> Heads:
        """The heads of a model that are meant; those with the most sink mass need a scan."""
        from sinklens.observe import every_head
        from sinklens.scanning import scan as run
        from sinklens.verify import verified
        from sinklens.vocabulary import Heads

        counts = [part for part in self.parts if isinstance(part, int)]
        loudest = run(model, prompts, outputs=False, progress=not quiet).top(max(counts)) if counts else ()
        every = every_head(verified(model).sites)
        return Heads.of([
            head for part in self.parts
            for head in (every if part == "all" else loudest[:part] if isinstance(part, int) else part)
        ])  # fmt: skip


def _show_scan(result: SinkScan, out: Path, sinks: float) -> None:
    save(result, out, result.plot())
    _table(result, result.sinks(sinks)[:20], f"Heads with at least {sinks:g} of their weight on the sink")
    _say(result.reading())
    _say(f"Wrote scan.parquet, scan.json and scan.html to {out}")


_ON_SCREEN = {"C1": "drop sink", "C2": "drop, renormalize", "C4": "ReLU", "Z": "silence"}


def _effects(result: Contrast) -> None:
    from rich.table import Table

    table = Table(title="KL(clean || changed) in nats a token [95 % interval over sequences]", title_justify="left")
    table.add_column("head", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    for name, words in _ON_SCREEN.items():
        table.add_column(f"{name} {words}", justify="right")
    for unit in dict.fromkeys(result.frame["heads"]):
        for state in ("dormant", "active"):
            effects = result.effects(unit, state)
            first = effects.iloc[0]
            label = f"{unit}\n{first.role}" if state == "dormant" else ""
            cells = (_interval(effects.loc[name], "kl") for name in _ON_SCREEN)
            table.add_row(label, f"{state}\n{first.share:.0%}", *cells, end_section=state == "active")
    _say(table)


def _interval(row: Any, metric: str) -> str:
    value, low, high = (row[key] for key in (metric, f"{metric}_low", f"{metric}_high"))
    if value != value:
        return "-"
    return _short(value) if low != low else f"{_short(value)}\n[{_short(low)} {_short(high)}]"


def _short(value: float) -> str:
    return f"{value:.4f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


def save(result: HeadTable, out: Path, figure: Any) -> None:
    """Write a result and its figure as a self-contained page."""
    from sinklens.table import replacing, writable

    result.save(out)
    with writable(out), replacing(out / f"{result.kind}.html") as path:
        figure.write_html(path, include_plotlyjs=True)


def _table(result: HeadTable, heads: Any, title: str) -> None:
    from rich.table import Table

    columns = [name for name in _SHOWN if name in result.frame]
    table = Table(title=title, title_justify="left")
    for name in ("head", *columns):
        table.add_column(name.replace("_", " "), justify="right")
    indexed = result.frame.set_index(["layer", "head"])
    for head in heads:
        row = indexed.loc[(head.layer, head.head)]
        table.add_row(str(head), *(_cell(row[name]) for name in columns))
    _say(table)


_SHOWN = (
    "sink_mass",
    "boost",
    "sink_position",
    "sink_token",
    "dormant_fraction",
    "value_ratio",
)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)


def _say(content: Any) -> None:
    from rich.console import Console

    Console(soft_wrap=isinstance(content, str)).print(content, markup=False)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        from sinklens import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; library errors go to standard error as one sentence, with exit code 2."""
    from sinklens.errors import SinklensError

    try:
        app()
    except SinklensError as error:
        typer.echo(f"sinklens: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("sinklens: stopped; nothing half-written is left behind", err=True)
        sys.exit(130)
