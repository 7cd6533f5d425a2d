"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _writable(out: Path) -> Path:
    """Found before a model is loaded, and not only when there is something to write."""
    from sinklens.table import check_writable

    check_writable(out)
    return out


ModelName = Annotated[str, typer.Argument(help="`demo`, a hub name, a local folder, or a .gguf file.", metavar="MODEL")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results; made if missing.", callback=_writable)]
Found = Annotated[
    Path,
    typer.Option("--out", help="Holds a contrast made with --full; the result goes there too.", callback=_writable),
]
Prompts = Annotated[
    str, typer.Option(help="`builtin`, `random`, a UTF-8 text file, or `hf:NAME[:SPLIT[:COLUMN]]`.", metavar="SOURCE")
]
Length = Annotated[int, typer.Option(help="Tokens a sequence, BOS included.")]
Count = Annotated[int | None, typer.Option("--n", help="How many sequences; all by default.")]
Device = Annotated[str, typer.Option(help="Where the model runs, e.g. `cuda`.")]
Dtype = Annotated[str | None, typer.Option(help="`float32`, `bfloat16` or `float16`; the checkpoint's by default.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
BackendName = Annotated[str, typer.Option(help="`hf`, or `bridge` for TransformerLens.")]
Seed = Annotated[int, typer.Option(help="Seed of resampling and random prompts.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
