"""Screening: the estimate is the second order of the exact KL, on every backend, without a change of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import sinklens as sl
from sinklens.causal import INTERVENTIONS, calibrate
from sinklens.normalizers.stacked import stacked
from tests import tiny

SMALL = ["Z", "C1", "C2", "C4raw"]


def prompts(count: int = 8, length: int = 24) -> sl.PromptSet:
    return sl.PromptSet.from_tokens(tiny.tokens(count, length))


def screened(model: Any, **options: Any) -> sl.Screening:
    return sl.screen(model, options.pop("on", prompts()), progress=False, **options)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma3", "GPTOSS"])
def test_small_doses_cost_what_is_estimated(family: str) -> None:
    """In the last layer a token reaches its own prediction only: there the exact KL is one change's at a time."""
    model = tiny.causal(family)
    doses = [INTERVENTIONS[name].dose(0.05) for name in SMALL]
    found = screened(model, heads="L1H0,L1H1,L1H2,L1H3", interventions=doses, draws=300)
    exact = sl.contrast(
        model, prompts(), found.heads, interventions=doses, resamples=50, controls=False, progress=False
    )
    for dose in doses:
        estimated = found.of(dose).set_index("head").kl
        for head, kl in estimated.items():
            assert kl == pytest.approx(exact.effects(f"L1H{head}").kl[dose.id], rel=0.25, abs=1e-7)


def test_what_reaches_later_tokens_counts() -> None:
    """A change at the tokens of one state in the first layer, summed over all that it reaches, ranks like the estimate."""
    model = tiny.causal(num_hidden_layers=3)
    heads = [f"L{layer}H{head}" for layer in range(3) for head in range(4)]
    found = screened(model, interventions=["Z", "C1"], draws=20)
    exact = sl.contrast(model, prompts(), heads, interventions=["C1"], judge=True, resamples=50, controls=False,
                        progress=False)  # fmt: skip
    agreement = found.agreement(exact).set_index(["intervention", "tokens"])
    assert agreement.loc[("Z", "active"), "heads"] >= 5
    assert agreement.spearman.min() > 0.7


def test_a_bridge_gives_the_same(tmp_path: Path) -> None:
    from tests.test_backends import bridge

    ours = screened(tiny.causal("Llama"), interventions=SMALL)
    lens = screened(bridge("Llama", tmp_path), interventions=SMALL)
    np.testing.assert_allclose(ours.frame.kl, lens.frame.kl, rtol=1e-3, atol=1e-8)


def test_nothing_is_left_behind() -> None:
    model = tiny.causal()
    before = model(tiny.tokens()).logits
    found = screened(model)
    assert found.of("C0").kl.max() < 1e-10
    assert set(found.frame.intervention) == set(INTERVENTIONS)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(tiny.tokens()).logits, before)
    assert len(found.top(3)) == 3


def test_heads_that_run_together_give_what_each_gives_alone() -> None:
    model = tiny.causal()
    heads = sl.Heads.of("L1H0,L1H1,L1H2,L1H3")
    calibrated = calibrate(model, prompts(), heads)
    together = screened(model, heads=heads, interventions=["C1m", "C4f", "C4N", "C5", "Mn"])
    for head in heads:
        alone = screened(model, heads=[head], interventions=["C1m", "C4f", "C4N", "C5", "Mn"])
        mine = together.frame[together.frame["head"] == head.head]
        np.testing.assert_allclose(mine.kl, alone.frame.kl, rtol=1e-4, atol=1e-9)
    means = [sl.MeanSink(calibrated[head].sink) for head in heads]
    assert stacked(means).offset.shape == (4, 1, 8)  # type: ignore[union-attr]
    assert stacked([sl.ReLU(gauge="raw"), sl.ReLU(gauge="sink")]) is None
    assert stacked([sl.ReLU(), sl.Softmax()]) is None


def test_round_trip_and_picture(tmp_path: Any) -> None:
    found = screened(tiny.causal(), interventions=SMALL)
    again = sl.Screening.load(found.save(tmp_path))
    assert again.frame.equals(found.frame)
    assert again.plot("C2", "all").to_json() == found.plot("C2", "all").to_json()
    assert "heads screened; silencing costs most at L" in found.reading()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: screened(m, interventions=["C9"]), "unknown intervention"),
        (lambda m: screened(m, on=prompts(3)), "every fourth sequence is set aside"),
        (lambda m: screened(m, on=prompts(8, 8)), "the first 8 rows are left out"),
        (lambda m: screened(m, heads="L7H0"), "L7H0"),
        (lambda m: screened(m, draws=0), "draws >= 1"),
    ],
)
def test_nonsense_is_refused(call: Any, text: str) -> None:
    with pytest.raises(sl.SinklensError, match=text):
        call(tiny.causal())


def test_an_encoder_has_no_next_token() -> None:
    with pytest.raises(sl.UnsupportedModelError, match="next-token"):
        screened(hf.BertModel(hf.BertConfig(**tiny.BASE)).eval())
