"""README and documentation: every Python block runs, every command parses, every relative link leads somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import sinklens as sl
from sinklens.cli import app
from tests import tiny

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [
    "the keeper counted the boats, and then she counted them again, and wrote the number down in the book.",
    "salt and pepper, bread and butter, night and day: some words come in pairs and the order is fixed.",
    "a list: one, two, three, four, five, six, seven. then the same list again, backwards: seven, six, five.",
    "it rained for nine days; on the tenth the road was gone, and with it the post, the bread and the news.",
    "take two eggs, a cup of flour and a little milk. stir until it is smooth, then wait for half an hour.",
    "who is there? nobody. then who is speaking? the wind, she said, and shut the door and turned the key.",
    "the court finds that the notice was late, that the late notice did harm, and that the harm must be paid.",
    "def double(x): return x + x. it is a small program, but it is a program, and it does what it says.",
]


def pages_with(pattern: str) -> list[Path]:
    return [page for page in PAGES if re.search(pattern, page.read_text(encoding="utf-8"), re.MULTILINE)]


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each fenced block in a language, but for those marked ``<!-- not run: reason -->``."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(rf"(<!-- not run: \w.* -->\n)?^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] and language == "python":
            continue
        yield text.count("\n", 0, match.start(2)) + 1, match[2]


def demo_shaped() -> tuple[Any, Any]:
    """A tiny random Llama with the demo model's 30 layers of 9 heads, so that its heads can be named."""
    model = tiny.causal(gain=1, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=36,
                        max_position_embeddings=2048)  # fmt: skip
    return model, tiny.tokenizer()


@pytest.mark.parametrize("page", pages_with("^```python$"), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, in one namespace, with a small model in place of the real one."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = demo_shaped()

    def load(name: str, dtype: str | None = None, **options: Any) -> tuple[Any, Any]:
        return (model if dtype is None else model.to(getattr(torch, dtype))), tokenizer

    # The lazy name first: looked up later, it would be the replacement, and stay.
    monkeypatch.setattr(sl, "load", load)
    monkeypatch.setattr("sinklens.models.load", load)
    prompts = sl.PromptSet.from_texts(TEXTS, tokenizer, length=48)
    names: dict[str, Any] = dict(sl=sl, model=model, tokenizer=tokenizer, texts=TEXTS, prompts=prompts, torch=torch)
    for line, code in blocks(page, "python"):
        # Line numbers of a traceback are those of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for _, block in (*blocks(page, "bash"), *blocks(page, "")):
            for line in block.splitlines():
                if line.startswith("sinklens "):
                    yield str(page.relative_to(ROOT)), line.partition("#")[0].strip()


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_every_command_exists_with_its_options(page: str, line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while words and hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"{page}: no command {name!r}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word not in known]
    assert not unknown, f"{page}: {line}: no option {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"", text):
        link = (target[0] or target[1]).partition("#")
        if re.match(r"[a-z]+:", link[0]):
            continue
        aim = (page.parent / link[0]) if link[0] else page
        assert aim.exists(), f"{page.name} points to {link[0]}"
        if link[2] and aim.suffix == ".md":
            headings = re.findall(r"^#+ +(.*)$", aim.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert link[2] in slugs, f"{page.name} points to {link[0]}#{link[2]}"
