"""Measured tables in written pages: each stands between two markers and is replaced by the script that measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklens.errors import InputError


def put_between(page: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        InputError: The page has no such markers.
    """
    content = page.read_text(encoding="utf-8") if page.exists() else ""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = content.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise InputError("a table has its place", expected=f"{start} ... {end} in {page}", got="no such markers")
    page.write_text(f"{before}{start}\n{text.rstrip()}\n{end}{after}", encoding="utf-8")


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a Markdown table."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
