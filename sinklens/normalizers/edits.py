"""Edits of the sink: take it away, take it away and renormalize, keep only its mean, or silence the head."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sinklens.normalizers.base import Mask, Normalizer, Scores, SoftmaxView, normalize_rows
from sinklens.normalizers.softmax import Softmax


@dataclass(frozen=True)
class DropSink(Normalizer):
    """The inner weights with the sink's set to 0 and nothing renormalized: ``o - s v_s``.

    Over softmax this is exactly softmax-plus-one in the sink gauge: ``exp(u) / (1 + sum exp(u))``, u = z - z_sink.

    Attributes:
        inner: Whose weights are cut.
    """

    inner: Normalizer = field(default_factory=Softmax)

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return self.inner.weights(scores, visible, sink_keys).masked_fill(sink_keys, 0.0)

    def closed_form(self, view: SoftmaxView) -> Tensor | None:
        plain = self.inner.closed_form(view) if isinstance(self.inner, Softmax) else None
        return None if plain is None else plain - view.sink_output

    @property
    def uses_learned_sink(self) -> bool:
        return self.inner.uses_learned_sink


@dataclass(frozen=True)
class RenormalizeWithoutSink(Normalizer):
    """The inner weights without the sink, rescaled to sum to one: ``r = (o - s v_s) / (1 - s)``.

    This forces the head to read out content even where nearly all of its weight lay on the sink. A row that sees
    nothing but the sink is 0.

    Attributes:
        inner: Whose weights are cut and rescaled.
    """

    inner: Normalizer = field(default_factory=Softmax)

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        # A shift-invariant inner map is recomputed without the key, since 1 - s cancels for s near 1; one that needs
        # the sink as its gauge must still see it.
        seen = visible & ~sink_keys if self.inner.shift_invariant else visible
        return normalize_rows(self.inner.weights(scores, seen, sink_keys).masked_fill(sink_keys, 0.0))

    def closed_form(self, view: SoftmaxView) -> Tensor | None:
        return view.without_sink if isinstance(self.inner, Softmax) else None

    @property
    def uses_learned_sink(self) -> bool:
        return self.inner.uses_learned_sink


@dataclass(frozen=True)
class HideSink(Normalizer):
    """The inner map on a row that does not see the sink at all, so that nothing of it enters the denominator.

    Attributes:
        inner: What the remaining row runs on; it has no sink to take as its gauge.
    """

    inner: Normalizer

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return self.inner.weights(scores, visible & ~sink_keys, torch.zeros_like(sink_keys))


@dataclass(frozen=True)
class SumToOne(Normalizer):
    """The inner weights, sink included, divided by their sum; a row of zeros stays zero.

    Attributes:
        inner: Whose weights are normalized.
    """

    inner: Normalizer

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return normalize_rows(self.inner.weights(scores, visible, sink_keys))

    @property
    def uses_learned_sink(self) -> bool:
        return self.inner.uses_learned_sink


@dataclass(frozen=True, eq=False)
class MeanSink(Normalizer):
    """The sink replaced by its mean contribution: ``o - s v_s + mean(s v_s)``.

    Tells a sink that acts as a constant bias from one that is not needed at all.

    Attributes:
        mean: Mean of ``s v_s`` over calibration tokens for this head, ``[d_value]``; see
            :func:`sinklens.causal.calibration.head_means`.
    """

    mean: Tensor

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return DropSink().weights(scores, visible, sink_keys)

    def closed_form(self, view: SoftmaxView) -> Tensor | None:
        return view.output - view.sink_output

    @property
    def offset(self) -> Tensor:
        return self.mean

    @property
    def uses_learned_sink(self) -> bool:
        return True


@dataclass(frozen=True)
class DropHeaviest(Normalizer):
    """Softmax with each row's heaviest non-sink key set to 0, the control for "any heavy key matters".

    Attributes:
        renormalize: Whether the remaining weights are rescaled to sum to one.
    """

    renormalize: bool = False

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        content = scores.float().masked_fill(~visible | sink_keys, -torch.inf)
        heaviest = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, content.argmax(-1, keepdim=True), True)
        heaviest = heaviest & visible & ~sink_keys
        if self.renormalize:
            return Softmax().weights(scores, visible & ~heaviest, sink_keys)
        return Softmax().weights(scores, visible, sink_keys).masked_fill(heaviest, 0.0)

    @property
    def uses_learned_sink(self) -> bool:
        return True


@dataclass(frozen=True)
class DropMatched(Normalizer):
    """Softmax with a random set of non-sink keys set to 0 that weighs as much as the sink, or all that there is.

    The control for "taking away that much weight matters, wherever it lies". A row takes its keys in an order that is
    drawn once, until their weight comes as close to the sink's as that order allows.

    Attributes:
        renormalize: Whether the remaining weights are rescaled to sum to one.
        seed: Seed of the order of the keys.
    """

    renormalize: bool = False
    seed: int = 0

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        weights = Softmax().weights(scores, visible, sink_keys)
        order = torch.randperm(scores.shape[-1], generator=torch.Generator().manual_seed(self.seed)).to(scores.device)
        content = weights.masked_fill(sink_keys, 0.0)[..., order]
        # A key is in if at least half of it still fits under the sink's weight.
        fits = content.cumsum(-1) - content / 2 <= (weights * sink_keys).sum(-1, keepdim=True)
        dropped = torch.zeros_like(fits).index_copy(-1, order, fits) & visible & ~sink_keys
        if self.renormalize:
            return Softmax().weights(scores, visible & ~dropped, sink_keys)
        return weights.masked_fill(dropped, 0.0)

    @property
    def uses_learned_sink(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class Constant(Normalizer):
    """The head's output replaced by a constant: zero-ablation by default, mean-ablation with the mean output.

    Attributes:
        value: The output put in place, ``[d_value]``, or None for zero.
    """

    value: Tensor | None = None

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        return torch.zeros_like(scores, dtype=torch.float32)

    def closed_form(self, view: SoftmaxView) -> Tensor:
        return torch.zeros_like(view.output)

    @property
    def offset(self) -> Tensor | None:
        return self.value


@dataclass(frozen=True)
class Mix(Normalizer):
    """A dose between two normalizers: ``(1 - alpha) * low + alpha * high``.

    Attributes:
        high: The normalizer at dose 1.
        alpha: The dose in [0, 1].
        low: The normalizer at dose 0.
    """

    high: Normalizer
    alpha: float
    low: Normalizer = field(default_factory=Softmax)

    def weights(self, scores: Scores, visible: Mask, sink_keys: Mask) -> Scores:
        low, high = (part.weights(scores, visible, sink_keys) for part in (self.low, self.high))
        return torch.lerp(low, high, self.alpha)

    def closed_form(self, view: SoftmaxView) -> Tensor | None:
        low, high = self.low.closed_form(view), self.high.closed_form(view)
        return None if low is None or high is None else torch.lerp(low, high, self.alpha)

    @property
    def offset(self) -> Tensor | None:
        return None if self.high.offset is None else self.alpha * self.high.offset

    @property
    def uses_learned_sink(self) -> bool:
        return self.low.uses_learned_sink or self.high.uses_learned_sink
