"""The counterfactual check and what an awake head reads, on cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

import sinklens as sl
from sinklens.triggers import Protocol, find_triggers
from sinklens.triggers.awake import _by_band, _in_words, _matched, _read
from sinklens.triggers.counterfactual import Trial, control_tokens, edited, plan, trigger_tokens
from sinklens.triggers.features import TokenTable, vocabulary
from sinklens.triggers.states import find_sinks, read_states
from sinklens.triggers.study import Case, Study, split
from tests import planted
from tests.test_triggers_finding import synthetic

QUICK = Protocol(draws=300, resamples=300)


def study_and_case(chosen: tuple[str, ...] = ("token '9'",)) -> tuple[Study, Case]:
    """One head, awake exactly where a feature of the set holds."""
    prompts = planted.prompts()
    table = TokenTable.of(prompts)
    features = {f.name: f for f in vocabulary(table, ["token", "previous token", "context"], 10)}
    members = tuple(features[name] for name in chosen)
    union = np.any([feature.track(table) for feature in members], axis=0)
    activity = synthetic(np.where(union, 0.1, 0.9)[None], prompts)
    states = read_states(activity, 8)
    study = Study(prompts, activity, states, table, *split(prompts), QUICK)
    return study, Case(sl.Head(0, 0), 0, 1, members, union & states.counted)


def test_a_head_that_does_not_follow_the_token_fails_the_check() -> None:
    """States of a planted model, but a model without plants: the association stands, the edits change nothing."""
    prompts = planted.prompts()
    recorded = sl.record_activity(planted.model("GPT2", {(0, 3): (9, 20)}), prompts, batch_size=16, progress=False)
    found = find_triggers(planted.model("GPT2", {}), prompts, activity=recorded, protocol=QUICK, batch_size=16,
                          progress=False, reading=False).frame  # fmt: skip
    assert found.counterfactual.tolist() == ["failed"]
    assert found.grade.tolist() == ["associated"]
    assert found.insert_low[0] <= 0.1


def test_pairs_stand_at_the_same_place_and_controls_are_as_frequent() -> None:
    study, case = study_and_case(("token '9'", "after '20'"))
    counts = study.table.counts()
    ((first, offset), *rest) = trigger_tokens(study, case)
    assert {study.table.texts[code] for code, _ in [(first, offset), *rest]} == {"9", "20"}
    for code, back in trigger_tokens(study, case):
        controls = control_tokens(study, case, code, back)
        assert not {study.table.texts[c] for c in controls} & {study.table.texts[code], "1"}
        assert np.abs(np.log(counts[controls] / counts[code])).max() < 0.2
        edits = plan(study, case)
        for pair in edits[(code, back), "insert"]:
            assert pair.trigger is not None
            assert (pair.trigger.sequence, pair.trigger.place) == (pair.control.sequence, pair.control.place)
            assert pair.trigger.read - pair.trigger.place == back
            assert not case.union[pair.trigger.sequence, pair.trigger.read]
        for pair in edits[(code, back), "remove"]:
            assert study.table.codes[pair.control.sequence, pair.control.place] == code
            assert pair.control.sequence in study.conf


def test_sets_about_context_alone_are_not_testable() -> None:
    assert plan(*study_and_case(("token occurred before",))) == {}


def test_an_edit_changes_one_token_and_ends_where_the_head_is_read() -> None:
    study, _ = study_and_case()
    made = edited(study, [Trial(3, 20, 22, int(study.table.codes[5, 7]))])
    assert made.length == 23
    changed = made.tokens[0] != study.prompts.tokens[3, :23]
    assert changed.nonzero().flatten().tolist() in ([20], [])
    assert made.tokens[0, 20] == study.prompts.tokens[5, 7]


def test_what_is_read_by_hand() -> None:
    codes = np.array([[0, 1, 2, 3, 1]])  # the last token occurred before, at 1; 2 followed it
    hidden = np.array([[True, False, False, False, False]])
    awake = np.array([[False, False, False, False, True]])
    delimiter = np.array([[False, False, False, True, False]])

    def read(*weights: float) -> dict[str, float]:
        content = np.zeros((1, 5, 5), dtype=np.float32)
        content[0, 4] = weights
        return _read(content, awake, codes, delimiter, hidden, True)

    even = read(0, 0.2, 0.2, 0.2, 0.2)
    assert even["effective_keys"] == pytest.approx(4, rel=1e-5)
    assert even["uniform_divergence"] == pytest.approx(0, abs=1e-6)
    assert even["delimiters_in_view"] == 0.25
    assert even["reads"] == "near uniform"
    assert read(0, 0, 0.1, 0, 0)["reads"] == "induction"
    mostly = np.array([[True, True, True, False, True]])
    content = np.array([0, 0.2, 0.2, 0.2, 0.2], dtype=np.float32) * awake[:, :, None]
    assert (
        _read(content, awake, codes, mostly, hidden, True)["reads"] == "near uniform"
    )  # 3 of 4 in view are delimiters
    previous = read(0, 0, 0, 0.1, 0)
    assert previous["previous_share"] == previous["delimiter_share"] == pytest.approx(1)
    assert read(0, 0, 0, 0, 0.5)["reads"] == "itself"
    assert (
        _in_words({**previous, "previous_share": 0.0, "delimiter_share": 0.0, "effective_share": 0.2})
        == "selected tokens"
    )


def test_loss_is_compared_with_tokens_as_frequent() -> None:
    """A change that depends on frequency alone shows nothing; one at the trigger shows itself."""
    study, case = study_and_case()
    picks = study.conf[:16]
    frequency = study.table.counts()[study.table.codes[picks]].astype(float)
    flat = _matched(_by_band(study, picks, case, 0 * frequency + 3.0).sum(0))
    assert flat == pytest.approx(0)
    at_trigger = _matched(_by_band(study, picks, case, 2.0 * case.union[picks]).sum(0))
    assert at_trigger == pytest.approx(2)


def test_the_sink_is_where_most_heads_park() -> None:
    prompts = planted.prompts()
    made = synthetic(np.full((3, 80, 64), 0.5), prompts)
    place, mass = np.zeros((3, 80)), np.full((3, 80), 0.1)
    place[0], mass[0] = 4, 0.9
    place[1:], mass[1:, 10:] = 2, 0.6
    numbers = {**made.per_sequence, "located_position": place, "located_mass": mass}
    found = find_sinks(sl.Activity(prompts, made.sites, made.sink_keys, made.mass, made.norm, made.uniform, numbers))
    assert found[:10].tolist() == [4] * 10
    assert set(found[10:]) == {2}
