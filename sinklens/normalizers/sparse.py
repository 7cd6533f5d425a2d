"""Sparse normalizers: hard zeros, yet rows still sum to one, so the theory predicts that they keep their sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from entmax import entmax15, sparsemax
from torch import Tensor

from sinklens.normalizers.base import Mask, Normalizer, Scores


def _on_visible(project: Callable[..., Tensor], scores: Tensor, visible: Tensor) -> Tensor:
    hidden = scores.float().masked_fill(~visible, -1e9)
    # Shifting by the maximum first keeps the -1e9 of hidden keys far below every visible score of float32 size.
    projected = project(hidden - hidden.amax(-1, keepdim=True), dim=-1)
    return projected.masked_fill(~visible, 0.0)


@dataclass(frozen=True)
class Sparsemax(Normalizer):
    """Euclidean projection of the scores onto the simplex (arXiv 1602.02068)."""

    shift_invariant: ClassVar[bool] = True

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return _on_visible(sparsemax, scores, visible)


@dataclass(frozen=True)
class Entmax15(Normalizer):
    """The alpha-entmax map at alpha = 1.5, halfway between softmax and sparsemax (arXiv 1905.05702)."""

    shift_invariant: ClassVar[bool] = True

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return _on_visible(entmax15, scores, visible)
