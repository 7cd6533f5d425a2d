"""The task, the transformer and its hooks, training, and the models that ship."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator

import sinklens as sl
from sinklens.toy import (
    BigramBackcopy,
    Swap,
    ToyConfig,
    ToyTransformer,
    TrainSettings,
    TriggerTask,
    load,
    load_record,
    names,
    read_task,
    swaps,
    train,
)
from sinklens.toy.factors import CELLS, Cell
from sinklens.toy.model import run

ONE = ToyConfig(1, 1, 4, 4, 4, residual=False)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


# ---- the task ---------------------------------------------------------------------------------------------------------


def test_the_target_is_the_mean_up_to_and_including_the_trigger() -> None:
    batch = TriggerTask(6, 9).sample(50, seeded())
    for inputs, targets, j in zip(batch.inputs, batch.targets, batch.trigger.tolist(), strict=True):
        assert torch.allclose(targets[j], inputs[1 : j + 1].mean(0), atol=1e-6)
        assert targets[torch.arange(9) != j].abs().max() == 0
        assert inputs[0].tolist() == [1, 0, 0, 0, 0, 0]
        assert inputs[j, 1] == 1
        assert inputs[j, -1] == 0
        assert inputs[:, 1].sum() == 1
        assert inputs[:, -1].sum() == 7


def test_the_trigger_can_be_left_out_of_the_mean() -> None:
    batch = TriggerTask(6, 9, include_trigger=False).sample(20, seeded(), trigger=5)
    assert torch.allclose(batch.targets[:, 5], batch.inputs[:, 1:5].mean(1), atol=1e-6)


def test_every_trigger_position_comes_up_and_nothing_else() -> None:
    assert set(TriggerTask().sample(2000, seeded()).trigger.tolist()) == set(range(2, 16))
    assert set(TriggerTask(triggers=(3, 5)).sample(200, seeded()).trigger.tolist()) == {3, 4, 5}


def test_several_generators_give_each_model_its_own_data() -> None:
    task = TriggerTask()
    together = task.sample(8, [seeded(0), seeded(1)])
    assert together.inputs.shape == (2, 8, 16, 16)
    assert torch.equal(together.inputs[1], task.sample(8, seeded(1)).inputs)


def test_the_dataset_yields_the_same_sequences() -> None:
    pytest.importorskip("datasets")
    first = next(iter(TriggerTask().dataset(seed=3, batch=4)))
    expected = TriggerTask().sample(4, seeded(3))
    assert np.allclose(first["inputs"], expected.inputs[0].numpy())
    assert first["trigger"] == expected.trigger[0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(n=3), "n >= 4"),
        (dict(length=3), "length >= 4"),
        (dict(triggers=(1, 5)), "2 <= first <= last <= 15"),
        (dict(triggers=(2, 16)), "2 <= first <= last <= 15"),
        (dict(triggers=(6, 5)), "2 <= first <= last <= 15"),
    ],
)
def test_bad_tasks_are_refused(bad: dict[str, object], message: str) -> None:
    with pytest.raises(sl.InputError, match=message):
        TriggerTask(**bad)  # type: ignore[arg-type]


def test_a_fixed_trigger_stays_in_the_sequence() -> None:
    with pytest.raises(sl.InputError, match="the trigger is out of range"):
        TriggerTask().sample(2, seeded(), trigger=16)


def test_backcopy_repeats_the_token_before_a_trigger() -> None:
    task = BigramBackcopy()
    tokens = task.sample(40, seeded()).inputs
    rows, places = torch.nonzero(torch.isin(tokens[:, 1:-1], torch.tensor(task.trigger_ids)), as_tuple=True)
    assert len(rows) > 50
    assert torch.equal(tokens[rows, places + 2], tokens[rows, places])
    assert (tokens[:, 0] == 0).all()
    assert len(task.words()) == task.vocabulary
    with pytest.raises(sl.InputError, match="some tokens are triggers"):
        BigramBackcopy(tokens=5, triggers=4)


# ---- the transformer --------------------------------------------------------------------------------------------------


def test_hooks_have_the_names_shapes_and_marks_of_transformer_lens() -> None:
    model = ToyTransformer(ToyConfig(2, 3, 8, 5, 6, residual=True))
    _, cache = model.run_with_cache(model.probe())
    assert cache["blocks.1.attn.hook_q"].shape == cache["blocks.0.attn.hook_z"].shape == (2, 6, 3, 5)
    assert cache["blocks.1.attn.hook_pattern"].shape == (2, 3, 6, 6)
    scores = cache["blocks.0.attn.hook_attn_scores"]
    assert (scores[..., 0, 1:] == torch.finfo(scores.dtype).min).all()
    assert model.W_O.shape == (2, 3, 5, 8)
    assert model.get_submodule("blocks.1.attn") is not None


def test_what_a_hook_returns_is_used_and_gone_afterwards() -> None:
    model = load("softmax-1x1")
    inputs = TriggerTask().sample(4, seeded()).inputs
    before = model(inputs)
    silenced = model.run_with_hooks(inputs, [("blocks.0.attn.hook_z", lambda z, hook: torch.zeros_like(z))])
    assert silenced.abs().max() == 0
    assert torch.equal(model(inputs), before)
    with pytest.raises(sl.InputError, match="no such hook point"):
        model.run_with_hooks(inputs, [("blocks.9.attn.hook_z", lambda z, hook: z)])


def test_bad_inputs_and_weights_are_refused() -> None:
    with pytest.raises(sl.InputError, match=r"expected \[batch, pos, 4\]"):
        ToyTransformer(ONE)(torch.zeros(2, 4, 5))
    with pytest.raises(sl.InputError, match="the weights fit the configuration"):
        ToyTransformer(ONE, weights={"W_Q": torch.zeros(1, 1, 4, 4)})
    with pytest.raises(sl.InputError, match="this model takes token ids"):
        ToyTransformer(ToyConfig(1, 1, 4, 4, 4, residual=True, d_vocab=7))(torch.zeros(2, 4, 4))


def test_a_learned_sink_takes_weight_away() -> None:
    config = ToyConfig(1, 1, 4, 4, 4, residual=False, learned_sink=True)
    weights = config.initial(seeded())
    rows = [
        ToyTransformer(config, weights={**weights, "sink_logits": torch.full((1, 1), logit)}).run_with_cache(
            torch.zeros(1, 4, 4)
        )[1]["blocks.0.attn.hook_pattern"][0, 0, 3]
        for logit in (-30.0, 0.0)
    ]
    assert torch.allclose(rows[0], torch.full((4,), 0.25))
    assert torch.allclose(rows[1], torch.full((4,), 0.2))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_training_computes_what_the_hooked_model_does(cell: Cell) -> None:
    config = ToyConfig(2, 3, 8, 8, 6, residual=True, gated=cell.gated, learned_sink=cell.learned_sink)
    drawn = [config.initial(seeded(seed)) for seed in (0, 1)]
    weights = {name: 10 * torch.stack([each[name] for each in drawn]).requires_grad_() for name in drawn[0]}
    inputs = TriggerTask(8, 6).sample(4, [seeded(0), seeded(1)]).inputs
    results = []
    for point in (None, lambda name, tensor: tensor):
        predicted, patterns = run(weights, inputs, config, cell.normalizer, point)
        gradients = torch.autograd.grad(predicted.square().sum(), list(weights.values()))
        results.append((predicted, *patterns, *gradients))
    for folded, plain in zip(*results, strict=True):
        assert torch.allclose(folded, plain, rtol=1e-3, atol=1e-4 * float(plain.detach().abs().max()))


# ---- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalizer", "steps", "mass"),
    [(sl.Softmax(), (700, 1100), (0.999, 1.0)), (sl.ReLU.paper(), (600, 900), (0.0, 0.0))],
)
def test_one_layer_models_train_as_published(
    normalizer: sl.Normalizer, steps: tuple[int, int], mass: tuple[float, float]
) -> None:
    record = train(TriggerTask(), normalizer=normalizer, seeds=range(5), progress=False)
    assert record.solved.all()
    assert steps[0] <= record.steps.min()
    assert record.steps.max() <= steps[1]
    for model in record.models():
        off = read_task(model, TriggerTask()).off.item()
        assert mass[0] <= off <= mass[1]


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sinklens.toy.training import _Loop

    settings = TrainSettings(max_steps=40, save_every=10)
    whole = train(TriggerTask(6, 6), seeds=(0, 1), settings=settings, progress=False)
    advance = _Loop._advance

    def stopping(loop: _Loop) -> None:
        if loop.step == 25:
            raise KeyboardInterrupt
        advance(loop)

    file = tmp_path / "run.safetensors"
    monkeypatch.setattr(_Loop, "_advance", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(TriggerTask(6, 6), seeds=(0, 1), settings=settings, checkpoint=file, progress=False)
    monkeypatch.setattr(_Loop, "_advance", advance)
    resumed = train(TriggerTask(6, 6), seeds=(0, 1), settings=settings, checkpoint=file, progress=False)
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)
    assert np.array_equal(whole.curves[1], resumed.curves[1])
    with pytest.raises(sl.InputError, match="belongs to another run"):
        train(TriggerTask(6, 6), seeds=(0, 2), settings=settings, checkpoint=file, progress=False)


def test_what_cannot_train_is_refused() -> None:
    with pytest.raises(sl.InputError, match="passes a gradient to the scores"):
        train(TriggerTask(), normalizer=sl.Constant(), progress=False)
    with pytest.raises(sl.InputError, match="each model has its own seed"):
        train(TriggerTask(), seeds=(1, 1), progress=False)
    with pytest.raises(sl.InputError, match="rates are positive"):
        TrainSettings(tolerance=0.0)


# ---- the trained models -----------------------------------------------------------------------------------------------


def test_unknown_names_and_seeds_are_refused() -> None:
    with pytest.raises(sl.InputError, match="no such trained model"):
        load("softmax-9x9")
    with pytest.raises(sl.InputError, match="has no such seed"):
        load("softmax-1x1", seed=99)


@pytest.mark.parametrize("name", ["softmax-1x1", "softmax-2x2", "relu-1x1", "relu-2x2", "relu-4x4"])
def test_the_scanner_flags_softmax_heads_and_no_relu_head(name: str) -> None:
    batch = TriggerTask().sample(64, seeded(7))
    model = load(name)
    result = sl.scan(model, sl.PromptSet.from_inputs(batch.inputs, batch.labels()), progress=False)
    expected = model.cfg.n_layers * model.cfg.n_heads if name.startswith("softmax") else 0
    assert len(result.sinks(0.5)) == expected


TRIGGER_SETS = [name for name in names() if name != "backcopy"]


@pytest.mark.parametrize("name", TRIGGER_SETS)
def test_every_shipped_model_solved_its_task(name: str) -> None:
    record = load_record(name)
    assert record.solved.all()
    assert all(read_task(model, TriggerTask(), size=128).error < 0.03 for model in record.models())


def test_one_layer_relu_models_never_look_at_bos() -> None:
    assert all(read_task(model, TriggerTask()).highest_off.max() == 0 for model in load_record("relu-1x1").models())


@pytest.mark.parametrize("name", ["relu-2x2", "relu-4x4"])
def test_deeper_relu_models_leak_to_bos_in_some_rows_but_never_sink(name: str) -> None:
    # Training stops with off-trigger scores just below zero, so that a tail of rows crosses it.
    for model in load_record(name).models():
        reading = read_task(model, TriggerTask())
        assert 0 < reading.highest_off.max() < 0.02
        assert reading.off.max() < 3e-3
        assert reading.parked("off the trigger") == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_the_4x4_softmax_models_have_sinks_of_both_signs(seed: int) -> None:
    reading = read_task(load("softmax-4x4", seed), TriggerTask())
    words = reading.parking()
    assert (words == "off the trigger").sum() == 8
    assert (words == "at the trigger").sum() >= 2
    assert (words == "nowhere").sum() >= 5
    assert reading.at.max() > 0.9


@pytest.mark.parametrize("seed", [0, 1])
def test_backcopy_sleeps_on_bos_and_wakes_on_its_triggers(seed: int) -> None:
    model, task = load("backcopy", seed), BigramBackcopy()
    batch = task.sample(200, seeded(5))
    with torch.no_grad():
        logits, cache = model.run_with_cache(batch.inputs)
    pattern = cache["blocks.0.attn.hook_pattern"][:, 0]  # [batch, query, key]
    at = batch.at_trigger[:, 2:]
    assert pattern[:, 2:, 0][at].mean() < 1e-3
    assert pattern[:, 2:, 0][~at].mean() > 0.8
    # A few ordinary tokens leave BOS too, for copies of themselves.
    means = [float(pattern[:, 2:, 0][batch.inputs[:, 2:] == token].mean()) for token in range(task.vocabulary)]
    awake = {token for token, mean in enumerate(means) if mean < 0.5}
    assert set(task.trigger_ids) < awake
    assert len(awake) <= 7
    before = pattern.diagonal(-1, dim1=1, dim2=2)[:, 1:]  # weight of each query on the token before it
    assert before[at].mean() > 0.9
    assert before[~at].mean() < 0.1
    # Training stops at the first batch below 0.01; over fresh sequences it is a little more.
    assert task.score(logits, batch, residual=True)[1] < 0.025


# ---- the positive control ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def control() -> dict[str, Swap]:
    return {swap.id: swap for swap in swaps(load_record("softmax-1x1").models()[:3], size=500)}


def test_dropping_the_sink_costs_nothing(control: dict[str, Swap]) -> None:
    assert control["C1"].off.mean < 3e-4
    assert control["C1"].at.mean < 2e-3


def test_a_forced_read_out_hurts_where_the_head_should_be_silent(control: dict[str, Swap]) -> None:
    assert control["C2"].off.mean == pytest.approx(0.344, abs=0.01)
    assert control["C2"].at.mean < 2e-3


def test_relu_divided_by_the_count_replaces_the_head(control: dict[str, Swap]) -> None:
    assert control["C4"].off.mean == 0
    assert control["C4"].at.mean < 5e-3


def test_relu_without_a_count_cannot_average(control: dict[str, Swap]) -> None:
    assert control["C4 without count"].off.mean == 0
    assert control["C4 without count"].at.mean == pytest.approx(0.147, abs=0.02)


def test_the_gate_lies_in_the_score_of_the_sink(control: dict[str, Swap]) -> None:
    assert control["C5 mean"].at.mean > 0.15
    assert control["C5 fitted"].at.mean == pytest.approx(0.03, abs=0.01)


@pytest.mark.parametrize("swap", ["R1", "R1 random"])
def test_a_content_key_matters_at_the_trigger_only(control: dict[str, Swap], swap: str) -> None:
    assert control[swap].off.mean < 3e-4
    assert control[swap].at.mean == pytest.approx(0.12, abs=0.02)


def test_a_patch_of_the_head_is_the_same_swap() -> None:
    model, inputs = load("softmax-1x1"), TriggerTask().sample(16, seeded(3)).inputs
    with torch.no_grad(), sl.patched(model, sl.RenormalizeWithoutSink(), heads=[(0, 0)]):
        patched = model(inputs)
    swapped = ToyTransformer(model.cfg, sl.RenormalizeWithoutSink(), dict(model.named_parameters(recurse=False)))
    assert torch.allclose(patched, swapped(inputs), atol=1e-6)


def test_the_control_needs_models_of_one_head() -> None:
    with pytest.raises(sl.InputError, match="the control swaps the only head"):
        swaps([load("softmax-2x2")])
