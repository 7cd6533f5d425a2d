"""The notebooks run from top to bottom, are small, and show their outputs in the repository."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each
def test_outputs_are_stored_and_small(path: Path) -> None:
    assert path.stat().st_size < 1_000_000
    cells = code_cells(nbformat.read(path, as_version=4))
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) / 2
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    text = path.read_text(encoding="utf-8")
    assert "/site-packages/" not in text, "no machine's paths in what readers see"


@each
def test_it_opens_with_what_one_will_see(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert len(first.source.split()) > 30


@pytest.mark.slow
@pytest.mark.real
@each
def test_it_runs(path: Path) -> None:
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    client.execute()
