"""Softpick: a rectified softmax whose rows may sum to less than one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sinklens.normalizers.base import Mask, Normalizer, Scores


@dataclass(frozen=True)
class Softpick(Normalizer):
    """Rectified exponentials: ``relu(exp(z_k) - 1) / (sum_j |exp(z_j) - 1| + eps)``.

    Keys with negative scores get exactly 0 and still weigh in the denominator. Source: arXiv 2504.20966.

    Attributes:
        eps: Keeps the denominator positive; shared with the row's maximum like every other term.
    """

    eps: float = 1e-6

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        hidden = scores.float().masked_fill(~visible, -torch.inf)
        # Both terms are divided by exp(max(peak, 0)): large scores cannot overflow, and the 1 is shifted with them.
        peak = hidden.amax(-1, keepdim=True).clamp(min=0.0)
        difference = ((hidden - peak).exp() - (-peak).exp()).masked_fill(~visible, 0.0)
        total = difference.abs().sum(-1, keepdim=True) + self.eps * (-peak).exp()
        return torch.relu(difference) / total
