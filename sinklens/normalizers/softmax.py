"""Softmax: each row sums to one, so weight must go somewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sinklens.normalizers.base import Mask, Normalizer, Scores, SoftmaxView, masked_softmax


@dataclass(frozen=True)
class Softmax(Normalizer):
    """The model's own attention: ``exp(z_k) / sum_j exp(z_j)`` over the visible keys.

    Where the model has a learned sink logit, it takes part as a virtual key.
    """

    shift_invariant: ClassVar[bool] = True

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return masked_softmax(scores, visible)

    def closed_form(self, view: SoftmaxView) -> Tensor:
        return view.output
