"""Hand-written weights: errors, BOS weights and bounds as claimed, for several widths and lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sinklens as sl
from sinklens.toy import TriggerTask, constructions

SHAPES = [(16, 16), (4, 4), (5, 64), (32, 128)]


@pytest.mark.parametrize(("n", "length"), SHAPES)
def test_relu_is_exact_and_never_looks_at_bos(n: int, length: int) -> None:
    reading = constructions.relu(TriggerTask(n, length)).check().reading
    # How a sum of 128 float32 numbers rounds depends on the processor.
    assert reading.error <= (1e-7 if length <= 16 else length * 2**-24)
    assert reading.highest_off.max() == 0.0
    assert reading.at.max() == 0.0
    assert reading.total_at == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_deep_relu_is_exact_and_never_looks_at_bos(size: int) -> None:
    reading = constructions.relu_deep(size, size).check().reading
    assert reading.error <= 2.4e-7
    assert reading.highest_off.shape == (size, size)
    assert reading.highest_off.max() == reading.at.max() == 0.0


@pytest.mark.parametrize("margin", [0.5, 2.0])
def test_relu_margin_keeps_every_off_trigger_score_at_minus_g(margin: float) -> None:
    made = constructions.relu_margin(margin)
    batch = made.task.sample(64, torch.Generator().manual_seed(3))
    _, cache = made.model.run_with_cache(batch.inputs)
    scores = cache["blocks.0.attn.hook_attn_scores"][:, 0]
    visible = torch.ones(16, 16, dtype=torch.bool).tril()
    off = scores[~batch.at_trigger][visible.expand(64, -1, -1)[~batch.at_trigger]]
    assert torch.equal(off, torch.full_like(off, -margin))
    assert made.check().holds


@pytest.mark.parametrize(("n", "length"), SHAPES)
@pytest.mark.parametrize("beta", [4.0, 12.0])
def test_softmax_error_and_sink_are_tied(n: int, length: int, beta: float) -> None:
    made = constructions.softmax_sink(beta, TriggerTask(n, length))
    reading = made.check().reading
    assert reading.error <= (length - 1) * np.exp(-beta) + length * 2**-24
    assert reading.lowest_off.item() == pytest.approx(constructions.softmax_mass(beta, length - 1), rel=1e-5)
    assert reading.highest_off.item() == pytest.approx(constructions.softmax_mass(beta, 2), rel=1e-5)


@pytest.mark.parametrize(("n", "length"), SHAPES)
def test_a_pair_of_heads_needs_no_sink_off_the_trigger(n: int, length: int) -> None:
    reading = constructions.softmax_pair(20.0, TriggerTask(n, length)).check().reading
    assert reading.error <= (3e-7 if length <= 16 else 2 * length * 2**-24)
    assert reading.highest_off.max() <= 1 / 3 + 1e-6  # uniform: row 2 sees three keys
    assert reading.at[0, 0] < 1e-6
    assert reading.at[0, 1] > 1 - 1e-6


@pytest.mark.parametrize("length", [4, 6, 8, 16])
def test_many_heads_need_no_sink_at_all_exactly(length: int) -> None:
    assert constructions.sinkless_is_exact(length)


def test_the_sinkless_coefficients_explode() -> None:
    largest = [max(abs(float(a)) for a in constructions.sinkless_coefficients(length)[1]) for length in (4, 8, 16)]
    assert largest[0] < 1e3
    assert largest[1] > 1e8
    assert largest[2] > 1e21


def test_the_sinkless_model_works_in_float32_for_short_sequences() -> None:
    check = constructions.softmax_sinkless(TriggerTask(4, 4)).check()
    assert check.holds
    assert check.reading.error < 1e-3
    assert max(check.reading.highest_off.max(), check.reading.at.max()) <= 1 / 3 + 1e-6


def test_the_scanner_sees_no_sink_off_the_trigger_in_the_pair() -> None:
    made = constructions.softmax_pair()
    batch = made.task.sample(32, torch.Generator().manual_seed(0))
    prompts = sl.PromptSet.from_inputs(batch.inputs, batch.labels())
    assert not sl.scan(made.model, prompts, progress=False).sinks(0.5)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(sl.InputError, match="a margin is positive"):
        constructions.relu_margin(0.0)
    with pytest.raises(sl.InputError, match="average the trigger too"):
        constructions.relu(TriggerTask(include_trigger=False))
