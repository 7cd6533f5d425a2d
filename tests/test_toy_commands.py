"""The toy commands, the figures they draw, the factorial's table, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import sinklens as sl
from sinklens.toy import TrainSettings, TriggerTask, factorial, load_record, reproduce
from sinklens.toy import figures as drawing
from sinklens.toy.commands import app
from sinklens.toy.factors import CELLS, FactorialResult
from sinklens.toy.measuring import SeedInterval
from sinklens.toy.reports import put_between
from sinklens.toy.reproducing import FIGURES, TRIGGER


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    error = run(*arguments).exception
    assert isinstance(error, sl.InputError)
    return str(error)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "renderer", lambda: None)


@pytest.mark.usefixtures("plain")
def test_a_figure_comes_with_its_statistics(tmp_path: Path) -> None:
    done = run("reproduce", "--figure", "3", "--out", str(tmp_path), "--quiet")
    assert done.exit_code == 0, done.output
    assert "softmax-1x1: 8 of 8 seeds solved" in done.output
    assert "no static pictures" in done.output
    assert (tmp_path / "figure-3.html").stat().st_size > 10_000
    statistics = json.loads((tmp_path / "statistics.json").read_text(encoding="utf-8"))
    assert statistics["softmax-1x1"]["off"]["low"] > 0.99
    assert statistics["softmax-1x1"]["sinking"]["mean"] == 1
    assert statistics["relu-1x1"]["off"] == {"mean": 0, "low": 0, "high": 0, "seeds": 8}
    assert statistics["relu-1x1"]["settings"]["normalizer"].startswith("ReLU(scale='content'")


def test_a_figure_shows_the_pattern_with_the_future_left_blank(tmp_path: Path, plain: None) -> None:
    figure = reproduce(5, tmp_path, progress=False).figures[5]
    assert len(figure.data) == 4
    pattern = np.array(figure.data[0].z, dtype=float)
    assert np.isnan(pattern[np.triu_indices(16, 1)]).all()
    assert np.allclose(np.nansum(pattern, 1), 1, atol=1e-5)
    assert pattern[TRIGGER, 0] < 0.1 < 0.9 < pattern[TRIGGER - 1, 0]


@pytest.mark.parametrize("figure", ["9", "x", "", "3,2"])
def test_other_figures_are_refused(figure: str, tmp_path: Path) -> None:
    assert "no such figure" in refused("reproduce", "--figure", figure, "--out", str(tmp_path))


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refused("reproduce", "--figure", "3", "--retrain", "--out", str(tmp_path / "file"))
    assert "the output folder cannot be written" in message


def test_every_figure_has_its_models() -> None:
    from sinklens.toy.ship import RECIPES

    assert set(FIGURES) == {3, 4, 5, 6, 7, 8}
    assert {name for plan in FIGURES.values() for name in plan.models} <= set(RECIPES)
    assert set(sl.toy.names()) == set(RECIPES)


SMALL = ("--n", "6", "--length", "6", "--steps", "20", "--quiet")


def test_training_writes_weights_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    done = run("train", "--weights", "relu / count", "--seeds", "2", "--out", str(tmp_path), *SMALL)
    assert done.exit_code == 0, done.output
    assert "seed 1: not solved after 20 steps" in done.output
    about = json.loads((tmp_path / "relu---count-1x1.json").read_text(encoding="utf-8"))
    assert about["settings"]["seeds"] == [0, 1]
    assert (tmp_path / "relu---count-1x1.safetensors").exists()
    again = run("train", "--weights", "relu / count", "--seeds", "2", "--out", str(tmp_path), *SMALL)
    assert again.output == done.output
    message = refused("train", "--weights", "relu / count", "--seeds", "3", "--out", str(tmp_path), *SMALL)
    assert "belongs to another run" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights", "hardmax"), "no such cell"),
        (("--seeds", "0"), "a run has models"),
        (("--n", "3"), "n >= 4"),
        (("--length", "2"), "length >= 4"),
        (("--layers", "0"), "all of them >= 1"),
        (("--lr", "-1"), "rates are positive"),
    ],
)
def test_training_refuses_what_cannot_be(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refused("train", *arguments, "--out", str(tmp_path), "--quiet")


# ---- the factorial ----------------------------------------------------------------------------------------------------


def test_the_factorial_saves_loads_and_goes_on(tmp_path: Path) -> None:
    settings = TrainSettings(lr=1e-3, max_steps=20)
    task = TriggerTask(6, 6)
    cells = ["softmax", "relu / count"]
    first = factorial(seeds=2, settings=settings, cells=cells, task=task, folder=tmp_path, progress=False)
    again = factorial(seeds=2, settings=settings, cells=cells, task=task, folder=tmp_path, progress=False)
    assert [row.off for row in again.rows] == [row.off for row in first.rows]
    first.save(tmp_path / "table.json")
    loaded = FactorialResult.load(tmp_path / "table.json")
    assert loaded.markdown() == first.markdown()
    assert "| softmax | exp | sum | no | yes | 0/2 |" in first.markdown()
    with pytest.raises(sl.InputError, match="belongs to another run"):
        factorial(seeds=3, settings=settings, cells=cells, task=task, folder=tmp_path, progress=False)
    with pytest.raises(sl.InputError, match="no such cell"):
        factorial(cells=["hardmax"], progress=False)


def test_the_cells_cross_kernel_and_normalization() -> None:
    crossed = {(cell.kernel, cell.normalization.split(",")[0]) for cell in CELLS[:12]}
    kernels = {"exp", "sigmoid", "relu", "relu(exp-1)"}
    assert crossed == {(kernel, divisor) for kernel in kernels for divisor in ("sum", "count", "none")}
    assert len({cell.name for cell in CELLS}) == len({cell.slug for cell in CELLS}) == len(CELLS)


def test_intervals_stay_where_the_quantity_can_lie() -> None:
    interval = SeedInterval.of([1.0, 1.0, 0.7], most=1.0)
    assert (interval.low >= 0, interval.high) == (True, 1.0)
    assert f"{SeedInterval.of([0.0, 0.0]):.3f}" == "0"
    assert f"{SeedInterval.of([2.0]):.1f}" == "2.0"


def test_tables_go_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- t -->\nold\n<!-- /t -->\nb\n", encoding="utf-8")
    put_between(page, "t", "new\n")
    assert page.read_text(encoding="utf-8") == "a\n<!-- t -->\nnew\n<!-- /t -->\nb\n"
    with pytest.raises(sl.InputError, match="a table has its place"):
        put_between(page, "u", "new")


# ---- certificates -----------------------------------------------------------------------------------------------------


def test_one_softmax_head_never_misses_more_sink_than_its_error() -> None:
    certificate = sl.toy.certify(load_record("softmax-1x1"))
    assert 0.5 < certificate.worst < 1.05
    assert certificate.final.max() < 0.2
    assert certificate.some_layer_sinks


def test_the_bound_is_about_one_softmax_head() -> None:
    assert sl.toy.certify(load_record("softmax-2x2")).some_layer_sinks
    relu = sl.toy.certify(load_record("relu-1x1"))
    assert relu.worst > 100
    assert not relu.some_layer_sinks
    with pytest.raises(sl.InputError, match="a mass is a share"):
        sl.toy.certify(load_record("relu-1x1"), threshold=1.0)
