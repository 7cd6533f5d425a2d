"""The command line: parse, call, print. Every library error becomes one sentence and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sinklens.prompts import PromptSet
    from sinklens.table import HeadTable

app = typer.Typer(
    help="Shows why attention heads park their weight on a meaningless token, and tests it on real heads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

ModelName = Annotated[str, typer.Argument(help="`demo`, a hub name, a local folder, or a .gguf file.", metavar="MODEL")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results; made if missing.")]
Prompts = Annotated[str, typer.Option(help="`builtin`, or a UTF-8 text file.")]
Length = Annotated[int, typer.Option(help="Tokens a sequence, BOS included.")]
Limit = Annotated[int | None, typer.Option(help="Largest number of sequences; all by default.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


@app.command()
def scan(
    model: ModelName,
    out: Out = Path("runs/scan"),
    prompts: Prompts = "builtin",
    length: Length = 256,
    limit: Limit = None,
    sinks: Annotated[float, typer.Option(help="Mass from which a head is listed as a sink.")] = 0.5,
    gu: Annotated[bool, typer.Option("--gu", help="Count every row, as the published sink rate does.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    max_gib: Annotated[float | None, typer.Option(help="Refuse to start above this estimated memory.")] = None,
    quiet: Quiet = False,
) -> None:
    """Find the sink heads of a model.

    Example: `sinklens scan demo --length 128 --limit 16 --out runs/demo`
    """
    from sinklens.measures import SinkRule
    from sinklens.scanning import scan as run

    network, tokenizer = _load(model, dtype)
    chosen = _prompts(prompts, network, tokenizer, length, limit)
    limit_bytes = None if max_gib is None else int(max_gib * 2**30)
    rule = SinkRule.gu() if gu else SinkRule()
    result = run(network, chosen, rule=rule, max_bytes=limit_bytes, progress=not quiet)
    _save(result, out, result.plot())
    _say(result.reading())
    _table(result, result.sinks(sinks)[:20], f"Heads with at least {sinks:g} of their weight on the sink")
    _say(f"Wrote scan.parquet, scan.json and scan.html to {out}")


@app.command()
def demo(out: Out = Path("runs/demo"), quiet: Quiet = False) -> None:
    """Scan SmolLM2-135M for sink heads, on the built-in passages.

    Example: `sinklens demo --out runs/demo`
    """
    scan("demo", out=out, length=128, limit=32, quiet=quiet)


def _load(name: str, dtype: str | None = None) -> tuple[Any, Any]:
    from sinklens.errors import InputError
    from sinklens.models import load

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise InputError("unknown dtype", expected="float32, bfloat16 or float16", got=dtype)
    return load(name, dtype=dtype)


def _prompts(source: str, model: Any, tokenizer: Any, length: int, limit: int | None) -> PromptSet:
    from sinklens.errors import InputError
    from sinklens.prompts import PromptSet

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise InputError("the model has fewer positions", expected=f"length <= {positions}", got=length)
    if limit is not None and limit < 1:
        raise InputError("a run needs sequences", expected="limit >= 1", got=limit)
    if source == "builtin":
        return PromptSet.builtin(tokenizer, length=length, limit=limit)
    return PromptSet.from_file(source, tokenizer, length=length, limit=limit)


def _save(result: HeadTable, out: Path, figure: Any) -> None:
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


@app.callback()
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
