"""The positive control of the normalization test: swaps on a trained softmax head whose job is known.

The head of a one-layer model must write nothing off the trigger and a mean at it, so the error of each swap is read
against the truth and not against what the head did before. What the contrast reports on real heads has to come out
here as the theory says: dropping the sink costs nothing, a forced read-out hurts off the trigger, and a ReLU divided by
the count takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Generator, Tensor

from sinklens.errors import InputError
from sinklens.normalizers import DropHeaviest, DropSink, Normalizer, ReLU, RenormalizeWithoutSink, Softmax
from sinklens.normalizers.base import Mask, Scores
from sinklens.toy.measuring import SeedInterval
from sinklens.toy.model import ToyTransformer, causal
from sinklens.toy.task import TriggerBatch, TriggerTask


@dataclass(frozen=True)
class ConstantSink(Normalizer):
    """Softmax with every sink key's score set to one constant: ``z_sink = b`` in all rows.

    A head whose gate lies in the sink's score loses it; one whose gate lies in the content's scores does not.

    Attributes:
        logit: The constant b.
    """

    logit: float

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return Softmax().weights(scores.float().masked_fill(sink_keys, self.logit), visible, sink_keys)


@dataclass(frozen=True)
class DropRandom(Normalizer):
    """Softmax with one random content key of each row set to 0 and nothing renormalized.

    Attributes:
        seed: Which keys.
    """

    seed: int = 0

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        order = torch.rand(scores.shape, generator=Generator().manual_seed(self.seed))
        order = order.masked_fill(~visible | sink_keys, -1.0)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order.argmax(-1, keepdim=True), True)
        return Softmax().weights(scores, visible, sink_keys).masked_fill(chosen & visible & ~sink_keys, 0.0)


@dataclass(frozen=True)
class Swap:
    """One swap on trained heads; errors are root mean squares over coordinates and rows.

    Attributes:
        id: Short name, as in the contrast on real heads.
        words: What is done.
        off: Error in the rows off the trigger, from row 1 on.
        at: Error in the trigger's row.
    """

    id: str
    words: str
    off: SeedInterval
    at: SeedInterval


def swaps(
    models: Sequence[ToyTransformer], task: TriggerTask | None = None, *, size: int = 1000, seed: int = 11
) -> tuple[Swap, ...]:
    """Swap the normalizer of trained one-head models and measure the error against the task's truth.

    Args:
        models: Models of one layer and one head, one a training seed.
        task: What they were trained on; the paper's by default.
        size: Sequences measured on; as many others calibrate the gains and logits.
        seed: Seed of both.

    Returns:
        One row a swap; intervals are 95 % t intervals over the models.

    Raises:
        InputError: No model, or one of several heads.
    """
    shapes = [(model.cfg.n_layers, model.cfg.n_heads) for model in models]
    if not shapes or set(shapes) != {(1, 1)}:
        raise InputError("the control swaps the only head", expected="one or more models of 1x1", got=shapes)
    task = task or TriggerTask()
    generator = Generator().manual_seed(seed)
    calibration, batch = task.sample(size, generator), task.sample(size, generator)
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for model in models:
        for key, normalizer in _fitted(model, calibration).items():
            errors.setdefault(key, []).append(_error(model, normalizer, batch))
    return tuple(
        Swap(name, words, SeedInterval.of([off for off, _ in pairs]), SeedInterval.of([at for _, at in pairs]))
        for (name, words), pairs in errors.items()
    )


def _fitted(model: ToyTransformer, batch: TriggerBatch) -> dict[tuple[str, str], Normalizer]:
    with torch.no_grad():
        scores = model.run_with_cache(batch.inputs)[1]["blocks.0.attn.hook_attn_scores"][:, 0]  # [batch, query, key]
    content = causal(scores.shape[-1]).clone()
    content[:, 0] = False
    at = batch.at_trigger
    above = (scores - scores[..., :1])[at]  # the trigger's rows in the sink gauge
    keys = content.expand(len(scores), -1, -1)[at]
    by_count = 1 / float(above[keys].mean())
    plain = by_count / float(keys.sum(-1).float().mean())
    mean = float(scores[:, 2:, 0].mean())

    def loss(logit: float) -> float:
        off, trigger = _error(model, ConstantSink(logit), batch)
        return off**2 * float((~at).sum()) + trigger**2 * float(at.sum())

    best = float(minimize_scalar(loss, bounds=(mean - 20, mean + 20), method="bounded").x)
    return {
        ("C0", "nothing changed"): Softmax(),
        ("C1", "drop the sink"): DropSink(),
        ("C2", "drop the sink, renormalize"): RenormalizeWithoutSink(),
        ("C4", "ReLU over the count, one gain fitted"): ReLU(scale="content", gauge="sink", gain=by_count),
        ("C4 without count", "ReLU, one gain fitted"): ReLU(gauge="sink", gain=plain),
        ("C5 mean", "sink's score set to its mean"): ConstantSink(mean),
        ("C5 fitted", "sink's score set to the best constant"): ConstantSink(best),
        ("R1", "drop the heaviest content key"): DropHeaviest(),
        ("R1 random", "drop a random content key"): DropRandom(),
    }


def _error(model: ToyTransformer, normalizer: Normalizer, batch: TriggerBatch) -> tuple[float, float]:
    squared = (_predict(model, normalizer, batch.inputs) - batch.targets).square().mean(-1)  # [batch, pos]
    off = ~batch.at_trigger
    off[:, 0] = False
    return float(squared[off].mean().sqrt()), float(squared[batch.at_trigger].mean().sqrt())


def _predict(model: ToyTransformer, normalizer: Normalizer, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return ToyTransformer(model.cfg, normalizer, dict(model.named_parameters(recurse=False)))(inputs)


def table(rows: Sequence[Swap]) -> str:
    """The swaps as a Markdown table."""
    lines = ["| swap | what is done | rms error off the trigger | rms error at the trigger |", "|---|---|---|---|"]
    lines += [f"| {row.id} | {row.words} | {row.off:.2g} | {row.at:.2g} |" for row in rows]
    return "\n".join(lines) + "\n"
