"""Sigmoid attention: every key is weighed on its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sinklens.normalizers.base import Mask, Normalizer, Scores, count_visible


@dataclass(frozen=True)
class Sigmoid(Normalizer):
    """Independent gates: ``sigmoid(z_k + bias)``, with ``bias = -log n`` for n visible keys by default.

    Source: arXiv 2409.04431.

    Attributes:
        bias: A fixed bias, or None for ``-log n``, which gives a row of zero scores a total near one.
    """

    bias: float | None = None

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        bias = -count_visible(scores, visible).clamp(min=1.0).log() if self.bias is None else self.bias
        return torch.sigmoid(scores.float() + bias).masked_fill(~visible, 0.0)
