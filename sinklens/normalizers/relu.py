"""ReLU attention: no normalization, hard zeros, so a head can say nothing without a sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sinklens.errors import InputError
from sinklens.normalizers.base import Mask, Normalizer, Scores, count_visible

Gauge = Literal["raw", "sink"]
Count = Literal["none", "visible", "content"]


@dataclass(frozen=True)
class ReLU(Normalizer):
    """Rectified scores: ``gain * relu(z_k - z_ref - threshold)^power / n^count_exponent``.

    Softmax does not change when a constant is added to a row's scores; this map does. So swapping it into a trained
    head means choosing a *gauge*, the reference ``z_ref``: 0 (``raw``), or the log-sum-exp of the sink's scores
    (``sink``). Rows that see no sink key keep the raw gauge.

    Attributes:
        scale: What ``n`` counts: nothing (n = 1), the visible keys, or the visible keys but one (never below 1),
            the ``max(i, 1)`` of arXiv 2603.11487.
        gauge: The reference of the scores.
        gain: Positive factor on the weights.
        threshold: Subtracted from the scores before rectifying.
        power: 1 for ReLU, 2 for squared ReLU.
        count_exponent: Exponent of the count n.
    """

    scale: Count = "none"
    gauge: Gauge = "raw"
    gain: float = 1.0
    threshold: float = 0.0
    power: float = 1.0
    count_exponent: float = 1.0

    def __post_init__(self) -> None:
        if self.scale not in ("none", "visible", "content"):
            raise InputError("unknown count", expected="'none', 'visible' or 'content'", got=repr(self.scale))
        if self.gauge not in ("raw", "sink"):
            raise InputError("unknown gauge", expected="'raw' or 'sink'", got=repr(self.gauge))
        if not self.power > 0:
            raise InputError("the power of a rectified score is positive", expected="power > 0", got=self.power)

    @classmethod
    def paper(cls) -> ReLU:
        """The ReLU attention of arXiv 2603.11487 as its authors coded it: row i divided by max(i, 1)."""
        return cls(scale="content")

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        scores = scores.float()
        if self.gauge == "sink":
            scores = in_sink_gauge(scores, visible, sink_keys)
        raised = torch.relu(scores - self.threshold)
        if self.power != 1:
            raised = raised**self.power
        return self.gain * raised.masked_fill(~visible, 0.0) / self._divisor(scores, visible)

    def _divisor(self, scores: Tensor, visible: Tensor) -> Tensor | float:
        if self.scale == "none":
            return 1.0
        keys = count_visible(scores, visible) - (1 if self.scale == "content" else 0)
        return keys.clamp(min=1.0) ** self.count_exponent


def in_sink_gauge(scores: Tensor, visible: Tensor, sink_keys: Tensor) -> Tensor:
    """Scores minus the log-sum-exp of the visible sink keys' scores; rows that see no sink key are left as they are."""
    sinks = (visible & sink_keys).expand(scores.shape)
    reference = scores.masked_fill(~sinks, -torch.inf).logsumexp(-1, keepdim=True)
    return scores - torch.where(reference.isneginf(), 0.0, reference)
