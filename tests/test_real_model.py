"""The claims about the real SmolLM2-135M, on the built-in passages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sinklens as sl

pytestmark = pytest.mark.real


def test_the_scan_of_the_demo_model(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    found = sl.scan(model, sl.PromptSet.builtin(tokenizer, length=128, limit=6), progress=False)
    assert 125 <= int((found.frame.sink_mass > 0.3).sum()) <= 165  # 145 of 270 on WikiText-2
    assert found.top(2) == sl.Heads.of("L18H8,L18H7")
    row = found.frame.set_index(["layer", "head"])
    assert row.loc[(18, 8), "dormant_fraction"] > 0.9
    assert row.loc[(20, 8), "dormant_fraction"] > 0.3
    assert row.loc[(18, 8), "value_ratio"] < 0.2
    assert (found.frame.sink_position == 0).mean() > 0.5
    assert found.frame.max_row_sum_error.max() < 1e-5


def test_against_the_models_own_attentions(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    prompts = sl.PromptSet.builtin(tokenizer, length=64, limit=2)
    found = sl.scan(model, prompts, progress=False)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = model(prompts.tokens, output_attentions=True, use_cache=False).attentions
    finally:
        model.set_attn_implementation("sdpa")
    mass = torch.stack([layer[:, :, 8:, 0].mean((0, 2)) for layer in attentions])
    torch.testing.assert_close(
        torch.tensor(found.frame.sink_mass.to_numpy()).float(), mass.flatten(), atol=1e-5, rtol=1e-4
    )


def test_the_loudest_sink_may_be_dropped_but_not_renormalized(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    prompts = sl.PromptSet.builtin(tokenizer, length=96, limit=5)
    found = sl.contrast(model, prompts, "L18H8", controls=False, resamples=300, progress=False)
    effects = found.effects("L18H8", "dormant")
    assert effects.loc["C0", "kl"] < 1e-6
    assert effects.loc["C1", "kl"] < 0.01
    assert effects.loc["C2", "kl_low"] > 0.5
    assert effects.loc["Z", "kl"] < 0.01  # it never wakes here: surviving a swap is no evidence
    assert found.effects("L18H8", "active")["count"].eq(0).all()


def test_generation_under_a_patch(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    inputs = tokenizer("<|im_start|>The capital of France is", return_tensors="pt")
    before = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    with sl.patched(model, sl.ReLU(scale="visible", gauge="sink"), heads=[(18, 8)]):
        during = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    with sl.patched(model, sl.Constant()):
        silenced = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert "Paris" in tokenizer.decode(during[0])
    assert not torch.equal(silenced, before)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), before)
