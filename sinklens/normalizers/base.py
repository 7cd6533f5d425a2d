"""What every normalizer is: a pure map from one row of scores to one row of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Scores = Float[Tensor, "*row key"]
Mask = Bool[Tensor, "*#row key"]


class SoftmaxView(Protocol):
    """What a fused softmax attention knows about each row, without ever holding the row.

    Closed forms read from it only what they need; each attribute is computed when first read.
    """

    @property
    def output(self) -> Tensor:
        """Plain softmax output, ``[batch, head, query, d_value]``."""

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of the visible scores, learned sink left out, ``[batch, head, query]``, float32."""

    @property
    def sink_logit(self) -> Tensor | None:
        """The model's own learned sink logit, ``[head, 1]``, if it has one."""

    @property
    def sink_output(self) -> Tensor:
        """The sink's part of the output, sum over sink keys of weight times value."""

    @property
    def without_sink(self) -> Tensor:
        """Softmax output with the sink keys hidden: recomputed, because (o - s v) / (1 - s) cancels near s = 1."""


@dataclass(frozen=True)
class Normalizer(ABC):
    """A row-wise map from attention scores to attention weights.

    Rows live on the last (key) axis; any leading axes and any block of queries may be given at once, so blocked
    evaluation is exact. Inside, everything is float32. Keys that are not visible get weight 0 whatever their score,
    and a row with nothing visible is all 0.

    Class attributes:
        shift_invariant: Adding a constant to a row's scores leaves the weights unchanged.
    """

    shift_invariant: ClassVar[bool] = False

    @abstractmethod
    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        """Map scores to weights.

        Args:
            scores: Scaled (and soft-capped, biased) scores, ``[*row, key]``; entries that are not visible are ignored.
            visible: Which keys each row may see, broadcastable to ``scores``.
            sink_keys: Which keys count as the sink, broadcastable to ``scores``.

        Returns:
            Weights of the same shape, float32; rows need not sum to one.
        """

    def closed_form(self, view: SoftmaxView) -> Tensor | None:
        """The head output from a fused softmax attention, or None if this normalizer needs the rows themselves."""
        return None

    @property
    def uses_learned_sink(self) -> bool:
        """Whether the model's own learned sink logit stays in force, as a virtual key, under this normalizer."""
        return self.shift_invariant

    @property
    def offset(self) -> Tensor | None:
        """A constant ``[d_value]`` added to every head output, or None."""
        return None


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible keys in float32; a row with nothing visible is 0, never NaN."""
    hidden = scores.float().masked_fill(~visible, -torch.inf)
    # Subtracting a finite maximum ourselves keeps an all-hidden row at exp(-inf) = 0 instead of NaN.
    peak = hidden.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    exponentials = (hidden - peak).exp()
    return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def normalize_rows(weights: Tensor) -> Tensor:
    """Divide each row by its sum, with 0/0 := 0."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), 0.0)


def count_visible(scores: Tensor, visible: Tensor) -> Tensor:
    """How many keys each row may see, ``[*row, 1]``, float32."""
    return visible.sum(-1, keepdim=True).float().expand(*scores.shape[:-1], 1)
