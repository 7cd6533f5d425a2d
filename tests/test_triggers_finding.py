"""Trigger detection on models whose triggers are known, and on models that have none."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Generator

import sinklens as sl
from sinklens.errors import MemoryLimitError
from sinklens.toy.backcopy import BigramBackcopy
from sinklens.toy.constructions import softmax_pair
from sinklens.toy.shipped import load
from sinklens.toy.task import TriggerTask
from sinklens.triggers.commands import triggers as command
from sinklens.triggers.features import Feature
from sinklens.triggers.finding import find_triggers, holm, split
from sinklens.triggers.report import COLUMNS, TriggerReport
from sinklens.triggers.showing import page_of
from sinklens.triggers.study import Protocol
from tests import planted, tiny

QUICK = Protocol(draws=300, resamples=300)
SHORT = Protocol(draws=300, resamples=300, skip_rows=2, min_shift=2)


def find(model: Any, prompts: sl.PromptSet, protocol: Protocol = QUICK, **options: Any) -> TriggerReport:
    return find_triggers(model, prompts, protocol=protocol, batch_size=16, progress=False, **options)


def toy_prompts(count: int = 96) -> sl.PromptSet:
    batch = TriggerTask().sample(count, Generator().manual_seed(0))
    return sl.PromptSet.from_inputs(batch.inputs, batch.labels())


def synthetic(mass: np.ndarray, prompts: sl.PromptSet) -> sl.Activity:
    """A recording of heads with given sink mass ``[head, sequence, position]``, one layer, nothing else special."""
    heads, sequences, length = mass.shape
    names = ("first_four", "located_mass", "located_position", "entropy", "row_sum", "value_norm", "value_ratio")
    numbers = {name: np.ones((heads, sequences)) for name in names} | {"row_sum_error": np.zeros((heads, sequences))}
    uniform = np.broadcast_to(1 / np.arange(1, length + 1), (1, sequences, length)).astype(np.float32)
    site = sl.Site(0, "made", "causal", heads, heads)
    return sl.Activity(prompts, (site,), sl.SinkKeys(), mass.astype(np.float32), 1 - mass, uniform, numbers)


# ---- known answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "by"), [("softmax-1x1", "sink"), ("relu-1x1", "silence")])
def test_trained_toys_wake_at_the_trigger(name: str, by: str) -> None:
    (row,) = find(load(name), toy_prompts(), SHORT).frame.itertuples()
    assert (row.direction, row.trigger, row.sleeps_by, row.grade) == ("wakes", "'trigger'", by, "strict")
    assert row.auroc > 0.99
    assert row.low > 0.9
    assert row.counterfactual == "passed"
    assert row.reads == "near uniform"


def sink_off_and_at_the_trigger(model: Any, prompts: sl.PromptSet) -> np.ndarray:
    """Mean weight of every head on BOS, ``[head, 2]``: at content, and at the trigger."""
    activity = sl.record_activity(model, prompts, batch_size=16, skip_rows=2, progress=False)
    trigger, counted = np.array(prompts.labels) == "trigger", activity.counted(2)
    return np.stack([activity.mass[:, counted & here].mean(-1) for here in (~trigger, trigger)], -1)


def test_the_relu_toy_is_conditional_without_a_sink() -> None:
    ((off, _),) = sink_off_and_at_the_trigger(load("relu-1x1"), toy_prompts())
    assert off < 1e-3


def test_every_head_of_a_two_layer_toy_is_found() -> None:
    found = find(load("softmax-2x2"), toy_prompts(), SHORT)
    assert set(found.graded("strict")) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_four_layer_toy_has_heads_of_both_directions(seed: int) -> None:
    """Some heads of 16 sleep until the trigger, others park at it: those, and only those, whose sink mass says so."""
    model, prompts = load("softmax-4x4", seed), toy_prompts()
    strict = find(model, prompts, SHORT).frame.query("grade == 'strict'")
    off, at = sink_off_and_at_the_trigger(model, prompts).T
    for direction, expected in (("wakes", (off > 0.9) & (at < 0.3)), ("parks", (off < 0.3) & (at > 0.8))):
        rows = strict[strict.direction == direction]
        assert {4 * row.layer + row["head"] for _, row in rows.iterrows()} == set(np.flatnonzero(expected)) != set()
        assert set(rows.trigger) == {"'trigger'"}
        assert set(rows.reads) == {"near uniform"}
        assert rows.low.min() > 0.9


def test_construction_e_has_no_head_that_sleeps_off_the_trigger() -> None:
    """Two softmax heads without an off-trigger sink: nothing wakes; the second head parks at the trigger."""
    model, prompts = softmax_pair().model, toy_prompts()
    (row,) = find(model, prompts, SHORT).frame.itertuples()
    assert (row.layer, row.head, row.direction, row.trigger) == (0, 1, "parks", "'trigger'")
    assert row.low > 0.9
    assert sink_off_and_at_the_trigger(model, prompts)[:, 0].max() < 0.3


@pytest.mark.parametrize("seed", [0, 1])
def test_backcopy_model_wakes_at_its_triggers_and_where_else_it_really_does(seed: int) -> None:
    """The named ids are exactly those at which the head leaves BOS: the task's triggers, where it reads the token
    before, and a few ordinary ids, where it reads the token itself."""
    task, model = BigramBackcopy(), load("backcopy", seed)
    prompts = sl.PromptSet.from_tokens(task.sample(120, Generator().manual_seed(3)).inputs)
    best = find(model, prompts, SHORT).confirmed.query("direction == 'wakes'").iloc[0]
    named = {int(token.strip("'")) for token in best.tokens.split(", ")}

    pattern = sl.attention_patterns(model, prompts, [(0, 0)], batch_size=16)[sl.Head(0, 0)].numpy()
    ids, places = prompts.tokens.numpy(), np.arange(task.length)
    on = {"bos": pattern[:, :, 0], "before": pattern[:, places, places - 1], "itself": pattern[:, places, places]}
    mean = {key: np.array([w[:, 3:][ids[:, 3:] == i].mean() for i in range(1, 33)]) for key, w in on.items()}
    assert named == set(np.flatnonzero(mean["bos"] < 0.5) + 1) >= set(task.trigger_ids)
    others = np.array(sorted(named - set(task.trigger_ids)))
    assert mean["before"][np.array(task.trigger_ids) - 1].min() > 0.9
    assert mean["itself"][others - 1].min() > 0.7
    assert best.grade == "strict"


PLANTS = {(0, 0): (5,), (0, 3): (9, 20), (1, 1): (30, 31, 32)}


def named_by_head(report: TriggerReport) -> dict[tuple[int, int], set[int]]:
    rows = report.confirmed
    sets = [{int(token.strip("'")) for token in tokens.split(", ")} for tokens in rows.tokens]
    return dict(zip(zip(rows.layer, rows["head"], strict=True), sets, strict=True))


PLANTED = {head: set(ids) for head, ids in PLANTS.items()}


@pytest.mark.parametrize("where", [{}, {"before": 1}, {"before": 3}, {"left_pad": 5}], ids=str)
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_planted_heads_are_found_wherever_the_sink_is(family: str, where: dict[str, int]) -> None:
    found = find(planted.model(family, PLANTS), planted.prompts(**where))
    assert named_by_head(found) == PLANTED
    assert set(found.confirmed.grade) == {"strict"}
    assert (found.confirmed.direction == "wakes").all()


def test_a_report_marks_other_text_and_a_contrast_takes_it() -> None:
    model = planted.model("GPT2", PLANTS)
    report = find(model, planted.prompts())
    other = planted.prompts(count=8, seed=5)
    marks = report.marks(other)
    assert set(marks) == {sl.Head(*head) for head in PLANTS}
    for head, ids in PLANTS.items():
        assert np.array_equal(marks[sl.Head(*head)], np.isin(other.tokens.numpy(), list(ids)))
    head = sl.Head(*next(iter(PLANTS)))
    given = [
        sl.contrast(model, other, [head], interventions=["Z", "C1"], triggers=triggers, resamples=50, controls=False,
                    progress=False)
        for triggers in (report, {head: PLANTS[tuple(head)]})  # type: ignore[index]
    ]  # fmt: skip
    assert given[0].frame.equals(given[1].frame)
    assert given[0].effects(str(head), "trigger")["count"].iloc[0] > 0


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_planted_heads_are_found_with_the_sink_elsewhere_in_each_sequence(family: str) -> None:
    """0 to 4 places of padding on the left, then 0 to 6 tokens before the sink: found by itself, or as it is told."""
    tokens, row = tiny.tokens(80, 72, 0, vocab=36), torch.arange(80)
    padding, before = row % 5, row // 5 % 7
    tokens[row, padding + before] = planted.BOS
    prompts = sl.PromptSet.from_tokens(tokens, torch.arange(72) >= padding[:, None])
    model = planted.model(family, PLANTS)
    found = find(model, prompts)
    assert named_by_head(found) == PLANTED
    assert set(found.confirmed.grade) == {"strict"}
    told = find(model, prompts, sink_keys=sl.SinkKeys(positions=before[:, None]))
    assert named_by_head(told) == PLANTED


def test_function_check_sees_the_head_that_matters() -> None:
    """Ablating a planted head changes something at its triggers only: its output elsewhere is its sink's value."""
    made = planted.model("GPT2", {(1, 1): (30, 31)})
    with torch.no_grad():
        made.transformer.h[1].attn.c_proj.weight[8:16] *= 200
    report = find(made, planted.prompts(), function=1, counterfactual=False, reading=False)
    found = report.confirmed.iloc[0]
    assert found.grade == "associated"
    assert "; not checked by changing tokens: 1." in report.reading()
    assert found.mean_loss_low <= found.mean_loss <= found.mean_loss_high
    assert abs(found.zero_loss) + abs(found.mean_loss) > 1e-4


def test_a_feature_of_ones_own() -> None:
    mine = Feature("mine", "query", "my tokens", lambda table: table.where(lambda text: text in ("30", "31", "32")))
    found = find(planted.model("GPT2", PLANTS), planted.prompts(), features=[mine], counterfactual=False, reading=False)
    assert found.frame[["layer", "head", "trigger"]].to_numpy().tolist() == [[1, 1, "my tokens"]]


# ---- known nothing --------------------------------------------------------------------------------------------------


def test_a_random_model_has_no_trigger_heads_and_the_report_says_why() -> None:
    found = find(tiny.causal("Llama", gain=1), planted.prompts())
    assert found.frame.empty
    assert list(found.frame) == list(COLUMNS)
    assert "no head passes the gate: of 8 heads 0 are in their usual state" in found.reading()
    assert found.plot().data == ()


def test_heads_that_always_or_never_sleep_do_not_pass() -> None:
    prompts = planted.prompts()
    noise = np.random.default_rng(0).uniform(0, 0.1, size=(80, 64))
    made = synthetic(np.stack([1 - noise, noise]), prompts)
    found = find(None, prompts, activity=made)
    assert found.frame.empty
    assert "sleeps at 1.00" in found.reading()


def test_a_model_without_any_sink_says_so() -> None:
    prompts = planted.prompts()
    found = find(None, prompts, activity=synthetic(np.full((2, 80, 64), 0.01), prompts))
    assert "the model has no sink" in found.reading()


def test_a_sink_outside_the_window_is_no_sign_of_wakefulness() -> None:
    found = find(tiny.causal("Mistral"), planted.prompts())
    assert "too few tokens see the sink" in found.reading()


def test_states_that_have_nothing_to_do_with_the_tokens() -> None:
    """Slowly changing states, and the states of planted heads rotated within sequences: nothing is confirmed."""
    prompts, rng = planted.prompts(), np.random.default_rng(1)
    slow = np.cumsum(rng.normal(size=(20, 80, 64)), -1) % 6 < 4
    planted_mass = sl.record_activity(planted.model("GPT2", PLANTS), prompts, batch_size=16, progress=False).mass
    turned = np.stack([np.roll(planted_mass[:, s], int(rng.integers(9, 50)), -1) for s in range(80)], 1)
    made = synthetic(np.clip(np.concatenate([np.where(slow, 0.95, 0.05), turned]), 0.01, 0.99), prompts)
    found = find(None, prompts, activity=made)
    assert found.confirmed.empty


# ---- input and output -----------------------------------------------------------------------------------------------


def test_bad_input_is_refused_with_what_would_do() -> None:
    few = planted.prompts(40)
    with pytest.raises(sl.InputError, match="at least 60 sequences of 25 tokens or more, got 40 of 40"):
        find(None, few)
    with pytest.raises(sl.InputError, match="at least 60 sequences of 25 tokens or more, got 0 of 80"):
        find(None, planted.prompts(length=20))
    with pytest.raises(sl.InputError, match="unknown feature: expected a Feature, or one of token"):
        find(None, planted.prompts(), features=["colour"])
    other = synthetic(np.full((2, 80, 64), 0.5), planted.prompts(seed=1))
    elsewhere = sl.SinkKeys(positions=torch.zeros(79, 1, dtype=torch.long))
    with pytest.raises(sl.InputError, match="sink positions belong to sequences: expected 1 or 80 rows, got 79"):
        find(planted.model("GPT2", {}), planted.prompts(), sink_keys=elsewhere)
    with pytest.raises(sl.InputError, match="a recording belongs to its prompts"):
        find(None, planted.prompts(), activity=other)


def test_halves_are_disjoint_and_share_every_domain() -> None:
    prompts = sl.PromptSet.builtin(tiny.tokenizer(), length=16)
    disc, conf = split(prompts)
    assert sorted([*disc, *conf]) == list(range(len(prompts)))
    domains = np.array(prompts.domains)
    for domain in set(domains):
        assert abs((domains[disc] == domain).sum() - (domains[conf] == domain).sum()) <= 1


def test_holm_by_hand() -> None:
    np.testing.assert_allclose(holm(np.array([0.01, 0.04, 0.03])), [0.03, 0.06, 0.06])


def test_a_recording_on_disk_gives_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = planted.model("GPT2", PLANTS), planted.prompts(before=2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = [sl.record_activity(model, prompts, sink_keys=sl.SinkKeys.at(2), batch_size=16, disk_from=size, progress=False)
            for size in (2**30, 0)]  # fmt: skip
    for name in ("mass", "norm", "uniform"):
        memory, disk = (getattr(activity, name) for activity in made)
        assert isinstance(disk, np.memmap)
        assert not isinstance(memory, np.memmap)
        np.testing.assert_array_equal(disk, memory)
    assert list(tmp_path.iterdir()) == []  # the files go with the arrays
    in_memory, on_disk = (find(model, prompts, activity=activity) for activity in made)
    pd.testing.assert_frame_equal(on_disk.frame, in_memory.frame)
    no_outputs = sl.record_activity(model, prompts, outputs=False, batch_size=16, disk_from=0, progress=False)
    assert np.isnan(no_outputs.norm).all()


def test_a_disk_without_room_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(
        MemoryLimitError, match=r"the disk has no room for the recording: expected .* free bytes in .*, got 5"
    ):
        sl.record_activity(planted.model("GPT2", PLANTS), planted.prompts(), disk_from=0, progress=False)


@pytest.fixture(scope="module")
def report() -> TriggerReport:
    return find(planted.model("Llama", PLANTS), planted.prompts())


def test_a_report_keeps_its_contract_and_survives_saving(report: TriggerReport, tmp_path: Path) -> None:
    assert list(report.frame)[: len(COLUMNS)] == list(COLUMNS)
    back = TriggerReport.load(report.save(tmp_path))
    pd.testing.assert_frame_equal(back.frame, report.frame)
    assert back.show("L0H3").body == report.show("L0H3").body
    assert back.reading() == report.reading()
    assert report.settings["discovery_sequences"] == 40


def test_same_seed_same_report(report: TriggerReport) -> None:
    again = find(planted.model("Llama", PLANTS), planted.prompts())
    pd.testing.assert_frame_equal(again.frame, report.frame)


def test_shown_text_is_escaped_and_triggers_are_marked(report: TriggerReport, tmp_path: Path) -> None:
    marks = report.frames["passages"].assign(token="<b>&\n")
    shown = TriggerReport(report.frame, report.settings, report.provenance, {**report.frames, "passages": marks})
    page = shown.show("L0H3")
    assert "<b>" not in page.body
    assert "&lt;b&gt;&amp;⏎" in page.body
    assert 'class="t"' in page._repr_html_()
    file = page_of(report).save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "http" not in file
    assert "color-scheme:light dark" in file
    assert "All confirmed sets." in file
    many = TriggerReport(pd.concat([report.frame] * 20), report.settings, report.provenance, report.frames)
    assert "The 40 best explained of 60 confirmed sets." in page_of(many).body
    with pytest.raises(sl.InputError, match=r"this head has no confirmed triggers: expected one of .*L0H3.*, got L0H1"):
        report.show("L0H1")


def test_the_map_shows_every_confirmed_set(report: TriggerReport) -> None:
    (heat,) = report.plot().data
    assert set(heat.y) == {"L0H0", "L0H3", "L1H1"}
    assert min(heat.z) > 0.9


def test_the_command_writes_its_three_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    planted.model("Llama", {(0, 3): (9, 20)}).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(folder)
    letters = [token for token, number in tokenizer.get_vocab().items() if 4 <= number < 36]
    text.write_text("".join(np.random.default_rng(0).choice(letters, 64 * 70)), encoding="utf-8")
    command(str(folder), out=tmp_path / "out", prompts=str(text), length=64, n=None, checks=2, quiet=True)
    assert {f"triggers.{kind}" for kind in ("parquet", "json", "html")} <= {
        f.name for f in (tmp_path / "out").iterdir()
    }
    assert "L0H3" in capsys.readouterr().out
