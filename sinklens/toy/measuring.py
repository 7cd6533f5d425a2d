"""What a toy model does with BOS, off the trigger and at it, and how wrong it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy import stats
from torch import Generator, Tensor

from sinklens.toy.model import ToyTransformer
from sinklens.toy.task import TriggerBatch, TriggerTask

Parking = Literal["off the trigger", "at the trigger", "nowhere"]
PARKED = 0.3
"""Mean weight from which a head counts as parked on BOS, the eps of arXiv 2410.10781."""


@dataclass(frozen=True, eq=False)
class ToyReading:
    """A toy model on a batch of trigger sequences.

    Attributes:
        error: Largest absolute error of any coordinate.
        off: Mean weight on BOS in rows off the trigger, ``[layer, head]``. Rows 0 and 1 are left out: row 0 sees
            nothing else, and no trigger can stand on row 1.
        at: Mean weight on BOS in the trigger's row, ``[layer, head]``.
        lowest_off: Smallest weight on BOS in those rows, ``[layer, head]``.
        highest_off: Largest weight on BOS in those rows, ``[layer, head]``.
        off_share: Mean of the same as a share of the row's sum, 0/0 = 0, for rows that do not sum to one.
        off_total: Mean sum of the rows off the trigger, ``[layer, head]``; 1 under softmax.
        total_at: Mean sum of the trigger's row, ``[layer, head]``.
        pattern: Mean pattern over sequences, ``[layer, head, query, key]``.
    """

    error: float
    off: np.ndarray
    at: np.ndarray
    lowest_off: np.ndarray
    highest_off: np.ndarray
    off_share: np.ndarray
    off_total: np.ndarray
    total_at: np.ndarray
    pattern: np.ndarray

    def parking(self, threshold: float = PARKED) -> np.ndarray:
        """Where each head parks on BOS, ``[layer, head]`` of words: the sign of a sink."""
        wakes_up = (self.off >= threshold) & (self.off >= self.at)
        falls_asleep = (self.at >= threshold) & (self.at > self.off)
        return np.select([wakes_up, falls_asleep], ["off the trigger", "at the trigger"], "nowhere")

    def parked(self, where: Parking) -> float:
        """Share of heads that park on BOS there."""
        return float((self.parking() == where).mean())


def read(model: ToyTransformer, batch: TriggerBatch) -> ToyReading:
    """Measure a model on trigger sequences."""
    with torch.no_grad():
        prediction, cache = model.run_with_cache(batch.inputs)
    wanted = batch.targets + batch.inputs if model.cfg.residual else batch.targets
    layers = range(model.cfg.n_layers)
    pattern = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in layers])
    at = batch.at_trigger  # [batch, query]
    bos, total = (
        part.permute(0, 2, 1, 3) for part in (pattern[..., 0], pattern.sum(-1))
    )  # [layer, head, batch, query]
    off, off_total = bos[..., 2:][..., ~at[:, 2:]], total[..., 2:][..., ~at[:, 2:]]
    share = torch.where(off_total > 0, off / off_total, 0.0)
    return ToyReading(
        float((prediction - wanted).abs().max()), _mean(off), _mean(bos[..., at]), off.amin(-1).numpy(),
        off.amax(-1).numpy(), _mean(share), _mean(off_total), _mean(total[..., at]), pattern.mean(1).numpy(),
    )  # fmt: skip


def _mean(per_row: Tensor) -> np.ndarray:
    return per_row.mean(-1).numpy()


def read_task(
    model: ToyTransformer, task: TriggerTask, *, size: int = 1000, seed: int = 1000, trigger: int | None = None
) -> ToyReading:
    """Measure a model on fresh sequences of a task.

    Args:
        model: The model.
        task: The task.
        size: Sequences.
        seed: Their seed; training seeds are small numbers, so the default meets none of them.
        trigger: Fix the trigger's position.
    """
    return read(model, task.sample(size, Generator().manual_seed(seed), trigger=trigger))


@dataclass(frozen=True)
class SeedInterval:
    """A mean over independently trained models with its 95 % t interval, cut to where the quantity can lie.

    Attributes:
        mean: Mean over seeds.
        low: Lower bound; NaN for a single seed.
        high: Upper bound.
        seeds: How many.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, values: np.ndarray | list[float], *, most: float = float("inf")) -> SeedInterval:
        """The interval of non-negative values, one a seed; ``most`` is the largest that the quantity can be."""
        array = np.asarray(values, dtype=float)
        mean = float(array.mean()) if len(array) else float("nan")
        if len(array) < 2:
            return cls(mean, float("nan"), float("nan"), len(array))
        half = float(stats.sem(array) * stats.t.ppf(0.975, len(array) - 1))
        return cls(mean, max(0.0, mean - half), min(most, mean + half), len(array))

    def __format__(self, spec: str) -> str:
        parts = [_short(value, spec or ".3g") for value in (self.mean, self.low, self.high)]
        return parts[0] if not self.low < self.high else f"{parts[0]} [{parts[1]}, {parts[2]}]"


def _short(value: float, spec: str) -> str:
    """A number in which an exact 0 can be told from a small one; a dash where there is none."""
    if value != value:
        return "-"
    if value == 0:
        return "0"
    text = format(value, spec)
    return text if any(digit in text for digit in "123456789") or not text.startswith("0") else f"{value:.0e}"
