"""Softmax with an exit: a constant in the denominator lets a row sum to less than one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklens.normalizers.base import Mask, Normalizer, Scores, SoftmaxView, masked_softmax


def _softmax_with_exit(scores: Tensor, visible: Tensor, logit: float | Tensor) -> Tensor:
    # The exit is one more key whose weight is thrown away; it shares the row's maximum, so it cannot overflow.
    exit_score = torch.as_tensor(logit, dtype=torch.float32, device=scores.device).expand(*scores.shape[:-1], 1)
    visible = visible.expand(scores.shape)
    seen = torch.cat([visible, torch.ones_like(visible[..., :1])], -1)
    return masked_softmax(torch.cat([scores.float(), exit_score], -1), seen)[..., :-1]


@dataclass(frozen=True)
class SoftmaxPlusOne(Normalizer):
    """Softmax with 1 added to the denominator: ``exp(z_k) / (1 + sum_j exp(z_j))``.

    In the sink gauge (scores minus the sink's score) this is exactly :class:`DropSink`. Not shift-invariant: the 1
    is compared with the raw scores. Fused form: ``o * sigmoid(lse)``. A model's own learned sink logit is replaced.
    """

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return _softmax_with_exit(scores, visible, 0.0)

    def closed_form(self, view: SoftmaxView) -> Tensor | None:
        return None if view.sink_logit is not None else view.output * torch.sigmoid(view.lse)[..., None]


@dataclass(frozen=True)
class LearnedSink(Normalizer):
    """Softmax with a learned exit: ``exp(z_k) / (exp(b) + sum_j exp(z_j))``.

    Fused form: ``o * sigmoid(lse - b)``. The logit is compared with scaled scores and is itself not scaled.
    A model's own learned sink logit is replaced.

    Attributes:
        logit: The exit's logit b, in units of scaled scores.
    """

    logit: float = 0.0

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return _softmax_with_exit(scores, visible, self.logit)

    def closed_form(self, view: SoftmaxView) -> Tensor | None:
        return None if view.sink_logit is not None else view.output * torch.sigmoid(view.lse[..., None] - self.logit)
