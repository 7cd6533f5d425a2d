"""The contrast: reuse equals the naive way, effects are what they say, nonsense is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sinklens as sl
from sinklens.causal import contrasting
from sinklens.causal.interventions import CORE
from tests import tiny

METRICS = list(contrasting.METRICS)


def prompts(count: int = 8, length: int = 24) -> sl.PromptSet:
    return sl.PromptSet.from_tokens(tiny.tokens(count, length))


def run(model: Any, heads: Any, **options: Any) -> sl.Contrast:
    return sl.contrast(model, options.pop("on", prompts()), heads, resamples=200, progress=False, **options)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma3", "GPTNeoX"])
def test_reuse_equals_the_naive_passes(family: str) -> None:
    model = tiny.causal(family, num_hidden_layers=4, n_layer=4)
    quick, naive = (run(model, "L0H1,L2H3,L3H0", sets=["L1H0,L3H2"], reuse=reuse) for reuse in (True, False))
    assert (quick.frame["heads"] == naive.frame["heads"]).all()
    difference = (quick.frame.estimate - naive.frame.estimate).abs() / naive.frame.estimate.abs().clip(lower=1e-3)
    assert np.nanmax(difference.to_numpy()) < 1e-3
    assert all("forward" not in vars(module) for module in model.modules())


def test_effects_are_those_of_a_patched_model() -> None:
    """KL and loss by hand for one head, from `sl.patched` itself, with padding on one sequence."""
    model, tokens = tiny.causal(), tiny.tokens(5, 24)
    mask = torch.ones(5, 24, dtype=torch.bool)
    mask[1, 18:] = False
    found = run(model, "L1H2", on=sl.PromptSet.from_tokens(tokens, mask), calibration=prompts(2, 20), controls=False)
    with torch.no_grad():
        clean = model(tokens, attention_mask=mask.long(), use_cache=False).logits.log_softmax(-1)
        with sl.patched(model, sl.RenormalizeWithoutSink(), "L1H2"):
            forced = model(tokens, attention_mask=mask.long(), use_cache=False).logits.log_softmax(-1)
    counted = mask & (mask.cumsum(-1) > 8)
    kl = (clean.exp() * (clean - forced)).sum(-1)[counted].mean()
    change = (clean - forced)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    predicted = (counted[:, :-1] & mask[:, 1:]).float()
    row = found.effects("L1H2").loc["C2"]
    assert row.kl == pytest.approx(float(kl), rel=1e-4)
    assert row.dloss * int(counted.sum()) == pytest.approx(float((change * predicted).sum()), rel=1e-4)
    assert row["count"] == int(counted.sum())


def test_the_unchanged_variant_and_the_silent_one() -> None:
    found = run(tiny.causal(), "L1H2").effects("L1H2")
    assert found.loc["C0", METRICS].abs().max() < 1e-5
    assert found.loc["Z", "kl"] > 1e-3
    assert found.loc["Z", "kl_low"] <= found.loc["Z", "kl"] <= found.loc["Z", "kl_high"]
    assert list(found.index) == [intervention.id for intervention in CORE]


def test_means_leave_a_constant_head_alone() -> None:
    """A head whose output is the same at every token loses nothing to mean-ablation."""
    model = tiny.causal("GPT2")
    with torch.no_grad():
        attn = model.transformer.h[1].attn
        attn.c_attn.weight[:, 64:72] = 0
        attn.c_attn.bias[64:72] = 1.5
    found = run(model, "L1H0", controls=False).effects("L1H0")
    assert found.loc["Mn", "kl"] < 1e-6
    assert found.loc["Z", "kl"] > 1e-4
    assert found.loc["C2", "kl"] < 1e-6  # every read-out of equal values is the same


def test_states_split_the_tokens() -> None:
    model = tiny.causal()
    found = run(model, "L0H0,L1H1")
    for unit in found.frame["heads"].unique():
        shares = found.frame[found.frame["heads"] == unit].drop_duplicates("tokens").set_index("tokens").share
        assert shares["all"] == 1
        assert 0 <= shares["dormant"] + shares["active"] <= 1
    assert set(found.frame.role) == {"sink", "control"}
    assert found.heads == sl.Heads.of("L0H0,L1H1")


def test_a_bridge_gives_the_same_contrast(tmp_path: Path) -> None:
    from tests.test_backends import bridge

    lens, model = bridge("Llama", tmp_path), tiny.causal("Llama")
    ours, theirs = (run(which, "L0H1,L1H2") for which in (model, lens))
    assert (ours.frame.estimate - theirs.frame.estimate).abs().max() < 1e-3


def test_save_load_and_draw(tmp_path: Path) -> None:
    found = run(tiny.causal(), "L1H2", sets=["L0H1,L1H2"])
    found.save(tmp_path)
    again = sl.Contrast.load(tmp_path)
    assert again.frame.equals(found.frame)
    assert again.frames["totals"].equals(found.frames["totals"])
    assert again.plot().to_json() == found.plot().to_json()
    assert "L1H2: dropping its sink costs" in found.reading()
    assert found.settings["caveats"]


def test_seeds_decide_intervals() -> None:
    model = tiny.causal()
    first, second, third = (run(model, "L1H2", seed=seed).frame for seed in (0, 0, 1))
    assert first.equals(second)
    assert not first.low.equals(third.low)
    assert first.estimate.equals(third.estimate)


class TestNonsense:
    def test_overlap(self) -> None:
        with pytest.raises(
            sl.InputError, match="calibration and test overlap: expected no shared sequence, got tokens-1"
        ):
            run(tiny.causal(), "L1H2", calibration=prompts().select([1]))

    def test_too_few_sequences(self) -> None:
        with pytest.raises(
            sl.InputError, match="every fourth sequence is set aside for calibration: expected at least 4"
        ):
            run(tiny.causal(), "L1H2", on=prompts(3))

    def test_heads(self) -> None:
        with pytest.raises(sl.InputError, match="a contrast needs heads"):
            run(tiny.causal(), [])
        with pytest.raises(IndexError, match="expected a query head in"):
            run(tiny.causal(), "L1H9")

    def test_two_sets_of_one_name(self) -> None:
        sets = ["L0H0,L0H1,L0H2,L0H3,L1H0", "L0H0,L0H1,L0H2,L0H3,L1H1"]
        with pytest.raises(sl.InputError, match=r"needs a name of its own: .* got L0H0\+4 twice"):
            run(tiny.causal(), [], sets=sets)

    def test_an_encoder(self) -> None:
        import transformers as hf

        with pytest.raises(sl.UnsupportedModelError, match="a contrast measures next-token loss: expected a causal"):
            run(hf.BertModel(hf.BertConfig(**tiny.BASE)).eval(), "L1H2")


def test_what_a_reader_should_know_is_said() -> None:
    found = run(tiny.causal(), "L1H2", sets=["L0H0,L0H3", "L0H0,L0H1", 1])
    remarks = found.settings["remarks"]
    assert any(line.startswith("L1H2: no sink heads on this text") for line in remarks)
    assert any(line.startswith("L0H0,L0H3, L1H0,L1H1,L1H2,L1H3: heads of several kv heads") for line in remarks)
    assert "L1H0,L1H1,L1H2,L1H3" in set(found.frame["heads"])
    with pytest.raises(sl.InputError, match="no such layer: expected 0 to 1, got 7"):
        run(tiny.causal(), "L1H2", sets=[7])
