"""The notebook of the trigger task runs from top to bottom, and is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_the_trigger_task.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_keeps_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NOTEBOOK.stat().st_size < 1_000_000
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) - 1
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
