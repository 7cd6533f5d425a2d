"""The command line as a stranger uses it: real folders, one clear sentence and exit code 2 for nonsense."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import pandas as pd
import pytest
import transformers as hf

from sinklens import cli
from sinklens.errors import InputError
from sinklens.prompts import PromptSet
from sinklens.triggers import TriggerReport
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local model folder, as `save_pretrained` leaves it."""
    path = tmp_path_factory.mktemp("model")
    tiny.causal("Llama").save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def sinklens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Done]:
    """The command line's own entry point, in this process: a start of the interpreter takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str | Path | float) -> Done:
        monkeypatch.setattr(sys, "argv", ["sinklens", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def test_a_real_process(folder: Path, tmp_path: Path) -> None:
    """Once as a shell starts it: an error is one line on standard error, exit code 2, nothing else."""
    command = [sys.executable, "-m", "sinklens", "contrast", str(folder), "--heads", "top:0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "sinklens: `top:` takes a count: expected top:1 or more, got top:0"
    assert not list(tmp_path.iterdir())


def test_scan_and_contrast_write_their_results(folder: Path, tmp_path: Path, sinklens: Callable[..., Done]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text, and one more\n" * 40)
    done = sinklens("scan", folder, "--length", 48, "--n", 4, "--out", "out", "--sinks", 0.05)
    assert done.returncode == 0, done.stderr
    assert "8 heads" in done.stdout
    assert len(pd.read_parquet(tmp_path / "out/scan.parquet")) == 8
    done = sinklens(
        "contrast",
        folder,
        "--heads",
        "top:1,L1H2,0.3",
        "--prompts",
        text,
        "--length",
        48,
        "--n",
        5,
        "--out",
        "out",
        "--together",
    )
    assert done.returncode == 0, done.stderr
    assert "dormant" in done.stdout
    assert set(pd.read_parquet(tmp_path / "out/contrast.parquet").role) == {"sink", "set", "control"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {f"{kind}.{ending}" for kind in ("scan", "contrast") for ending in ("parquet", "json", "html")}
    assert not [name for name in names if not name.startswith(("scan.", "contrast."))]


def test_the_full_contrast_gives_verdicts_and_goes_on(
    folder: Path, tmp_path: Path, sinklens: Callable[..., Done]
) -> None:
    command = ("contrast", folder, "--heads", "L1H2,L0H1", "--length", 32, "--n", 6, "--out", "out", "--full")
    done = sinklens(*command)
    assert done.returncode == 0, done.stderr
    assert "2 heads: " in done.stdout
    table = pd.read_parquet(tmp_path / "out/verdicts.parquet")
    assert list(table.columns[:8]) == ["layer", "head", "verdict", "n1", "n2", "n3", "n4", "n5"]
    first = pd.read_parquet(tmp_path / "out/contrast.parquet")
    assert sinklens(*command).returncode == 0  # all parts are in the journal
    assert pd.read_parquet(tmp_path / "out/contrast.parquet").equals(first)
    done = sinklens("contrast", folder, "--heads", "L1H2", "--length", 32, "--n", 6, "--out", "out", "--full")
    assert done.returncode == 2
    assert "the journal here belongs to another run: expected the same variants" in done.stderr
    done = sinklens("contrast", folder, "--heads", "triggers", "--length", 32, "--n", 6, "--out", "out")
    assert done.returncode == 2
    assert "no triggers result here" in done.stderr


def test_bad_input_is_one_sentence_and_exit_code_2(folder: Path, tmp_path: Path, sinklens: Callable[..., Done]) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "words.txt").write_text("a word " * 200)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").write_text("in the way")
    encoder = tmp_path / "encoder"
    hf.BertForMaskedLM(hf.BertConfig(**tiny.BASE)).save_pretrained(encoder)
    tiny.tokenizer().save_pretrained(encoder)
    cases: list[tuple[list[object], str]] = [
        (
            ["scan", "no/such-model"],
            "no such model on disk, and the hub does not offer it or cannot be reached: expected a hub name",
        ),
        (["scan", "./nowhere"], "there is no model at this path"),
        (["scan", "nothing"], "the folder holds no model: expected config.json"),
        (["scan", folder, "--length", 9999], "the model has fewer positions: expected length <= 256, got 9999"),
        (["scan", folder, "--length", 6], "the first 8 rows are left out"),
        (["scan", folder, "--prompts", "empty.txt"], "empty.txt is empty"),
        (["scan", folder, "--prompts", "latin.txt"], "a text file is UTF-8"),
        (["scan", folder, "--length", 32, "--n", 2, "--out", "file/out"], "the output folder cannot be written"),
        (["scan", folder, "--dtype", "int3"], "unknown dtype: expected float32"),
        (["scan", folder, "--device", "abacus"], "the device cannot be used: expected cpu"),
        (["scan", folder, "--backend", "jax"], "unknown backend: expected hf or bridge"),
        (["scan", folder, "--n", 0], "a run needs sequences: expected n >= 1"),
        (["scan", folder, "--length", 1], "at least two tokens"),
        (["scan", folder, "--prompts", "words.txt", "--length", 1], "at least two tokens"),
        (
            ["triggers", folder, "--prompts", "words.txt", "--length", 32],
            "confirmed on the other half: expected at least 60 sequences of 25 tokens or more, got 45 of 45",
        ),
        (["triggers", folder, "--length", 24], "of 25 tokens or more, got 0 of 75"),
        (["triggers", folder, "--checks", -1], "checks are counted: expected 0 or more, got -1"),
        (["triggers", folder, "--out", "file/out"], "the output folder cannot be written"),
        (["scan", folder, "--prompts", "hf:no/such-set"], "the dataset cannot be loaded"),
        (["contrast", folder, "--heads", "top:0"], "`top:` takes a count: expected top:1 or more, got top:0"),
        (
            ["contrast", folder, "--heads", "L1H7", "--length", 32, "--n", 4],
            "expected a query head in 0..3 (2 kv heads), got 7",
        ),
        (["contrast", folder, "--heads", "seven", "--length", 32, "--n", 4], "a head is written as layer and head"),
        (["contrast", "no/model/here", "--heads", "top:3,seven"], "a head is written as layer and head"),
        (["contrast", "no/model/here", "--layers", "one"], "layers are numbers: expected e.g. --layers 18,25, got one"),
        (["contrast", "no/model/here", "--heads", "triggers"], "runs/contrast"),
        (["contrast", "no/model/here", "--out", "file/out"], "the output folder cannot be written"),
        (["screen", "no/model/here", "--out", "file/out"], "the output folder cannot be written"),
        (["contrast", encoder, "--heads", "L0H1", "--length", 32, "--n", 4], "a contrast measures next-token loss"),
    ]
    for arguments, text in cases:
        done = sinklens(*map(str, arguments))
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert text in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        errors = [line for line in done.stderr.splitlines() if line.startswith("sinklens:")]
        assert len(errors) == 1
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "runs" / "triggers").exists()


def test_a_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch, sinklens: Callable[..., Done]) -> None:
    """Whatever HTTP library the hub's client uses; its errors are no OSErrors."""

    def fail(*_: object, **__: object) -> None:
        raise huggingface_hub.errors.HfHubHTTPError.__bases__[0]("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    done = sinklens("triggers", "no-such-model")
    assert done.returncode == 2
    assert "the hub does not offer it or cannot be reached" in done.stderr
    with pytest.raises(InputError, match="the dataset cannot be loaded"):
        PromptSet.from_dataset("no/such-set", tiny.tokenizer())


def test_no_trigger_head_is_a_result_that_says_why(folder: Path, tmp_path: Path, sinklens: Callable[..., Done]) -> None:
    tiny.causal("Llama", gain=1).save_pretrained(tmp_path / "calm")
    tiny.tokenizer().save_pretrained(tmp_path / "calm")
    done = sinklens("triggers", "calm", "--length", 32, "--quiet", "--out", "out")
    assert done.returncode == 0
    assert "No trigger heads: no head passes the gate: of 8 heads 0 are in their usual state" in done.stdout
    assert "the model has no sink" in done.stdout
    assert TriggerReport.load(tmp_path / "out").frame.empty
    assert "No trigger heads" in (tmp_path / "out" / "triggers.html").read_text(encoding="utf-8")


def test_help_shows_examples(sinklens: Callable[..., Done]) -> None:
    done = sinklens("--help")
    assert done.returncode == 0
    for command in ("scan", "contrast", "demo", "triggers", "report"):
        assert command in done.stdout
        assert "Example" in sinklens(command, "--help").stdout
    assert sinklens("--version").stdout.strip()
