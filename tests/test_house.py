"""The house rules: imports point left, heavy libraries stay in their rooms, importing is free."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sinklens

PACKAGE = Path(sinklens.__file__).parent
RANK = {
    "vocabulary": 0, "errors": 0, "normalizers": 1, "measures": 1, "prompts": 1, "table": 1, "attention": 2,
    "toy": 3, "backends": 3, "observe": 4, "patch": 4, "verify": 4, "scanning": 5, "triggers": 6, "causal": 5, "plots": 7,
    "models": 8, "report": 8, "options": 8, "cli": 9, "__main__": 10,
}  # fmt: skip
ROOMS = {
    "transformers": ("backends/huggingface.py", "models.py"),
    "transformer_lens": ("backends/bridge.py",),
    "datasets": ("prompts.py", "toy/"),
    "plotly": ("plots.py", "toy/figures.py", "report"),
}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Absolute names that a module imports, and whether that happens when it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(child) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }  # fmt: skip
    lazy = {
        id(c) for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for c in ast.walk(n)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in typing_only:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if names == ["sinklens"] and isinstance(node, ast.ImportFrom):
                names = [f"sinklens.{a.name}" for a in node.names if a.name in RANK]
            for name in names:
                yield name, id(node) not in lazy


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_left(path: Path) -> None:
    # A room's commands are the part of the command line that lies with it.
    room = "cli" if path.name == "commands.py" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name, eager in imports(path):
        top, _, rest = name.partition(".")
        if top == "sinklens" and rest:
            other = rest.partition(".")[0]
            # Results draw themselves by a call to the right, made only when asked.
            commands = room == "cli" or not rest.endswith(".commands")
            allowed = commands and (RANK[other] <= RANK[room] or (not eager and other == "plots"))
            assert allowed, f"{room} imports {other}"
        elif top in ROOMS:
            inside = str(path.relative_to(PACKAGE))
            assert any(inside.startswith(home) for home in ROOMS[top]), f"{inside} imports {top}"


def test_importing_is_free() -> None:
    code = "import sys, sinklens; print(sorted({'torch', 'transformers', 'transformer_lens', 'plotly', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_using_it_registers_nothing_and_needs_no_lens() -> None:
    code = (
        "import sys, torch, sinklens as sl; sl.scan, sl.patched, sl.ReLU, sl.contrast;"
        "print(sorted({'transformers', 'transformer_lens', 'plotly', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists_and_is_described() -> None:
    for name in dir(sinklens):
        if not name.startswith("_"):
            assert getattr(sinklens, name).__doc__, name
