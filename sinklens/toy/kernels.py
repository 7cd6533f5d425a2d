"""Attention taken apart for the factorial: a kernel on each score, and a divisor of each row.

``weights = kernel(score) / divisor(row)``. The paper's contrast changes three things at once: exp to relu (the kernel),
sum to count (the divisor), and positive to hard zero. Here each is varied alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklens.normalizers import Normalizer
from sinklens.normalizers.base import Mask, Scores, count_visible


class Kernel(ABC):
    """A non-negative function of one score."""

    @abstractmethod
    def __call__(self, scores: Tensor) -> Tensor:
        """Map scores to unnormalized weights."""


@dataclass(frozen=True)
class Exp(Kernel):
    """``exp(z)``: positive everywhere."""

    def __call__(self, scores: Tensor) -> Tensor:
        return scores.exp()


@dataclass(frozen=True)
class Logistic(Kernel):
    """``sigmoid(z)``: positive everywhere, bounded."""

    def __call__(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)


@dataclass(frozen=True)
class Rectified(Kernel):
    """``relu(z)``: hard zeros."""

    def __call__(self, scores: Tensor) -> Tensor:
        return torch.relu(scores)


@dataclass(frozen=True)
class RectifiedExp(Kernel):
    """``relu(exp(z) - 1)``, the numerator of softpick (arXiv 2504.20966): hard zeros."""

    def __call__(self, scores: Tensor) -> Tensor:
        return torch.relu(scores.expm1())


class Divisor(ABC):
    """What a row is divided by."""

    @abstractmethod
    def __call__(self, raised: Tensor, visible: Tensor) -> Tensor:
        """The divisor ``[*row, 1]`` of rows ``[*row, key]`` whose hidden entries are 0."""


@dataclass(frozen=True)
class BySum(Divisor):
    """The row's sum, so that rows add up to one; a row of zeros stays zero."""

    def __call__(self, raised: Tensor, visible: Tensor) -> Tensor:
        total = raised.sum(-1, keepdim=True)
        # Not clamped to a tiny number: 0 / tiny^2 in the gradient would be NaN.
        return torch.where(total > 0, total, 1.0)


@dataclass(frozen=True)
class ByCount(Divisor):
    """The number of visible keys but one, at least 1: the paper's ``max(i, 1)``."""

    def __call__(self, raised: Tensor, visible: Tensor) -> Tensor:
        return (count_visible(raised, visible) - 1).clamp(min=1.0)


@dataclass(frozen=True)
class ByNothing(Divisor):
    """One: no normalization at all."""

    def __call__(self, raised: Tensor, visible: Tensor) -> Tensor:
        return raised.new_ones(())


@dataclass(frozen=True)
class Factored(Normalizer):
    """``kernel(z_k) / divisor(row)``.

    Attributes:
        kernel: Function of one score.
        divisor: Function of the row.
    """

    kernel: Kernel
    divisor: Divisor

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        # Hidden scores are set to 0 first: an exp of one could overflow, and inf * 0 is NaN in the gradient.
        raised = self.kernel(scores.float().masked_fill(~visible, 0.0)).masked_fill(~visible, 0.0)
        return raised / self.divisor(raised, visible)


@dataclass(frozen=True)
class Hidden(Normalizer):
    """The inner map with the sink keys out of sight: ``weights(scores, visible and not sink)``.

    Attributes:
        inner: The map.
    """

    inner: Normalizer

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return self.inner.weights(scores, visible & ~sink_keys, sink_keys)
