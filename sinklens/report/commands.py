"""The command ``sinklens report``; mounted by :mod:`sinklens.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with results, or with folders of results.", metavar="DIR")],
) -> None:
    """Turn the runs in a folder into one page, DIR/report.html.

    Example: `sinklens report runs/demo`
    """
    from sinklens.report.page import report as run

    typer.echo(f"Wrote {run(folder)}")
