"""Surgery: only what a verdict allows, measured on other text, and a recipe that brings the same model back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sinklens as sl
from sinklens.causal.desinking import allowed_form
from sinklens.causal.verdicts import MEANINGS
from tests import tiny, verdict_plants
from tests.verdict_plants import Kind


def desinked(kind: Kind, **options: Any) -> tuple[Any, sl.Desinking]:
    model, held_out = verdict_plants.plant(kind, 0), verdict_plants.prompts(kind, seed=7)
    scan = sl.scan(model, held_out, progress=False)
    found = sl.desink(model, scan, verdict_plants.contrast_of(kind, 0), held_out, resamples=100, progress=False,
                      **options)  # fmt: skip
    return model, found


@pytest.mark.parametrize(
    ("kind", "forms"), [("clean", {"C4f", "C4f2"}), ("asleep", {"Z"}), ("redundant", {"Z"}), ("constant", {"C1m"})]
)
def test_a_head_gets_the_form_its_verdict_allows(kind: Kind, forms: set[str]) -> None:
    _, found = desinked(kind, second=verdict_plants.prompts(kind, seed=9, count=4))
    assert set(found.frame.form) <= forms
    assert len(found.frame) == 1
    before, after = (found.curve[found.curve["heads"] == count].iloc[0] for count in (0, 1))
    assert before.change == 0
    # The head of each pair of copies that was not tested keeps its sink.
    assert after.sink_heads == before.sink_heads - 1
    assert abs(after.change) < 0.02 * before.loss
    assert list(found.curve.text.unique()) == ["held-out", "second"]


def test_every_verdict_has_an_answer() -> None:
    forms = {v: allowed_form(SimpleNamespace(verdict=v, n3=False, power=1)) for v in MEANINGS}
    assert {v for v, form in forms.items() if form is None} == {
        "kernel", "broadcast", "graded", "not forced", "never dormant", "undecided"
    }  # fmt: skip
    assert allowed_form(SimpleNamespace(verdict="graded", n3=True, power=1)) == "C1"
    assert allowed_form(SimpleNamespace(verdict="broadcast", n3=False, power=1)) is None


def test_a_recipe_brings_the_same_model_back(tmp_path: Path) -> None:
    model, found = desinked("clean")
    recipe = found.recipe(1)
    again = sl.Recipe.load(recipe.save(tmp_path / "recipe.json"))
    assert sl.Desinking.load(found.save(tmp_path)).recipe(1).heads == recipe.heads
    tokens = verdict_plants.prompts("clean", 11, count=2, length=16).tokens
    plain = model(tokens).logits
    with recipe.applied(model):
        changed = model(tokens).logits
        written = model.generate(tokens[:1, :8], max_new_tokens=6, do_sample=False, pad_token_id=0)
    with again.applied(model):
        assert torch.equal(model(tokens).logits, changed)
        # With a cache and without: the count of visible keys is the same.
        slowly = model.generate(tokens[:1, :8], max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(written, slowly)
    assert not torch.equal(changed, plain)
    assert torch.equal(model(tokens).logits, plain)
    assert found.recipe(0).plan == {}


def test_every_normalizer_survives_a_file(tmp_path: Path) -> None:
    plan = {
        sl.Head(0, 0): sl.MeanSink(torch.randn(8)), sl.Head(0, 1): sl.Constant(), sl.Head(0, 2): sl.Constant(torch.ones(8)),
        sl.Head(1, 0): sl.DropSink(sl.ReLU(gain=0.1, threshold=1 / 3, gauge="sink", scale="visible")),
        sl.Head(1, 1): sl.Mix(sl.Sparsemax(), 0.3), sl.Head(1, 2): sl.LearnedSink(-2.5),
    }  # fmt: skip
    again = sl.Recipe.load(sl.Recipe(plan).save(tmp_path / "r.json"))
    model, tokens = tiny.causal(), tiny.tokens()
    with sl.Recipe(plan).applied(model):
        wanted = model(tokens).logits
    with again.applied(model):
        assert torch.equal(model(tokens).logits, wanted)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    model, held_out = verdict_plants.plant("clean", 0), verdict_plants.prompts("clean", seed=7)
    scan, judged = sl.scan(model, held_out, progress=False), verdict_plants.contrast_of("clean", 0)
    same = verdict_plants.prompts("clean", 0)
    with pytest.raises(sl.InputError, match="heads were chosen on this text"):
        sl.desink(model, scan, judged, same, progress=False)
    # One sequence of the contrast's among others, padded otherwise: still seen.
    mixed = torch.nn.functional.pad(torch.cat([held_out.tokens, same.tokens[1:2]]), (1, 0))
    padded = sl.PromptSet.from_tokens(mixed, torch.arange(mixed.shape[1]).expand_as(mixed) > 0)
    with pytest.raises(sl.InputError, match="no sequence that the contrast has seen, got 1 of it, tokens-16 first"):
        sl.desink(model, scan, judged, padded, calibration=verdict_plants.prompts("clean", seed=8), progress=False)
    with pytest.raises(sl.InputError, match="no verdict allows a change"):
        sl.desink(model, scan, judged, held_out, min_mass=0.9999, progress=False)
    with pytest.raises(sl.InputError, match="the contrast is of another model"):
        sl.desink(tiny.causal(num_attention_heads=1, num_key_value_heads=1), scan, judged, held_out, progress=False)
    plain = sl.contrast(model, held_out, "L0H1", resamples=50, progress=False)
    with pytest.raises(sl.InputError, match="a verdict needs the interventions done state by state"):
        sl.desink(model, scan, plain, same, progress=False)
    with pytest.raises(sl.InputError, match="the recipe cannot be read"):
        sl.Recipe.load(tmp_path / "none.json")
    for odd in (
        "[1, 2]",
        "no JSON",
        '{"heads": {}, "model": {}, "sink_first": "one"}',
        '{"heads": {"L0H0": {"normalizer": "Constant", "value": ["a"]}}, "model": {}, "sink_first": 1}',
    ):
        (tmp_path / "odd.json").write_text(odd)
        with pytest.raises(sl.InputError, match="this is no recipe"):
            sl.Recipe.load(tmp_path / "odd.json")
    (tmp_path / "odd.json").write_text('{"heads": {"L0H0": {"normalizer": "Mine"}}, "model": {}, "sink_first": 1}')
    with pytest.raises(sl.InputError, match="unknown normalizer"):
        sl.Recipe.load(tmp_path / "odd.json")

    class Mine(sl.Softmax):
        """A normalizer that a file cannot bring back."""

    with pytest.raises(sl.InputError, match="a recipe holds normalizers of sinklens"):
        sl.Recipe({sl.Head(0, 0): Mine()}).save(tmp_path / "mine.json")
    assert not (tmp_path / "mine.json").exists()
