"""Calibration: what the interventions take from a head, measured on sequences that the test never sees.

Everything is a sum over tokens, so the model runs once for the means and twice for the fits, however many candidates
are weighed: a gain has a closed form, and thresholds and count exponents are compared inside the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor

from sinklens.attention import AttentionCall, AttentionResult, Inner, gather_keys, row_blocks
from sinklens.backends import Backend
from sinklens.errors import InputError
from sinklens.measures import gram
from sinklens.normalizers import ReLU
from sinklens.normalizers.base import count_visible
from sinklens.normalizers.relu import Gauge, in_sink_gauge
from sinklens.observe import mass_on
from sinklens.prompts import PromptSet
from sinklens.verify import evaluating, verified
from sinklens.vocabulary import Head, Heads, HeadsLike, SinkKeys

DORMANT, ACTIVE = 0.9, 0.5
"""A token is dormant at a head if at least .9 of its weight lies on the sink, active if at most .5 does."""

STATES = ("all", "dormant", "active")
GAUGES: tuple[Gauge, ...] = ("raw", "sink")
POWERS = (1, 2)
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Candidates for the count exponent of a fitted ReLU."""

_QUANTILES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 0.985, 0.993, 0.998)
_FINE = 7


@dataclass(frozen=True)
class ReLUFit:
    """A ReLU that imitates a head, and how well it does.

    Attributes:
        normalizer: Three fitted scalars (gain, threshold, count exponent) and a gauge.
        error: Squared error of the head's output after W_O, relative to its mean square over all tokens, by state of
            the tokens (``all``, ``dormant``, ``active``); NaN without such tokens.
    """

    normalizer: ReLU
    error: dict[str, float]


@dataclass(frozen=True, eq=False)
class HeadCalibration:
    """A head's calibration.

    Attributes:
        sink: Mean of the sink's contribution ``s v_sink``, ``[d_value]``.
        output: Mean of the head's output, ``[d_value]``.
        sink_logit: Mean score of the sink, log-sum-exp over its keys.
        exit_logit: The constant that imitates the head best as an exit without value, if fitted.
        relu: The best fitted ReLU by power, if fitted.
    """

    sink: Tensor
    output: Tensor
    sink_logit: float
    exit_logit: float | None = None
    relu: dict[int, ReLUFit] = field(default_factory=dict)


def calibrate(
    model: object,
    prompts: PromptSet,
    heads: HeadsLike,
    *,
    fit: bool = True,
    sink_keys: SinkKeys | None = None,
    skip_rows: int = 8,
    batch_size: int = 2,
) -> dict[Head, HeadCalibration]:
    """Measure what the interventions need from chosen heads, over tokens past ``skip_rows``.

    Args:
        model: A transformers model, a TransformerBridge, or a model with TransformerLens hooks.
        prompts: Calibration sequences.
        heads: Which heads.
        fit: Also fit ReLUs and an exit to each head; two more passes.
        sink_keys: Which keys count as the sink.
        skip_rows: Rows at each sequence's start that are left out.
        batch_size: Sequences a forward pass.

    Raises:
        InputError: No token is left past ``skip_rows``.
    """
    backend = verified(model)
    by_layer = Heads.of(heads).check(backend.sites).by_layer()
    keys = sink_keys or SinkKeys()
    watch = _Watch(backend, prompts, skip_rows, batch_size)
    means = _Means(by_layer, keys, watch)
    watch.run(means)
    found = means.calibrations()
    if not fit:
        return found
    grids = {layer: _Grid(*means.quantiles(layer)) for layer in by_layer}
    coarse = _Fitter(by_layer, grids, keys, watch)
    watch.run(coarse)
    fine = _Fitter(by_layer, {layer: coarse.finer(layer) for layer in by_layer}, keys, watch)
    watch.run(fine)
    fits, exits = fine.best()
    return {head: HeadCalibration(c.sink, c.output, c.sink_logit, exits[head], fits[head]) for head, c in found.items()}


def fit_relu(
    model: object, prompts: PromptSet, heads: HeadsLike, *, power: int = 1, **options: Any
) -> dict[Head, ReLUFit]:
    """Fit ``gain relu(z - z_ref - threshold)^power / n^exponent`` to heads by least squares on their output after W_O.

    The sink's key is left out of the fitted head. The gain has a closed form; threshold, exponent and gauge are taken
    from a grid that is refined once.

    Args:
        model: A transformers model, a TransformerBridge, or a model with TransformerLens hooks.
        prompts: Calibration sequences; never those of the test.
        heads: Which heads.
        power: 1 for ReLU, 2 for squared ReLU.
        **options: See :func:`calibrate`.
    """
    if power not in POWERS:
        raise InputError("a fitted ReLU has a power", expected=f"one of {POWERS}", got=power)
    return {head: c.relu[power] for head, c in calibrate(model, prompts, heads, **options).items()}


class _Watch:
    """Runs a watching route over the calibration sequences, and knows which tokens count."""

    def __init__(self, backend: Backend, prompts: PromptSet, skip_rows: int, batch_size: int) -> None:
        self.backend, self.prompts, self.skip_rows, self.batch_size = backend, prompts, skip_rows, batch_size
        longest = int(prompts.mask.sum(-1).max())
        if longest <= skip_rows:
            raise InputError(
                f"the first {skip_rows} rows are left out",
                expected=f"prompts of more than {skip_rows} tokens",
                got=longest,
            )
        self.counted = torch.zeros(0)

    def run(self, route: _Means | _Fitter) -> None:
        with evaluating(self.backend.model), torch.no_grad(), self.backend.attach(route):
            for rows, tokens, mask in self.prompts.batches(self.batch_size):
                real = self.prompts.mask[rows]
                self.counted = (real & (real.cumsum(-1) > self.skip_rows)).float()
                self.backend.forward(tokens, mask, logits=False)


class _Means:
    """First pass: means, and where the scores of the content lie."""

    def __init__(self, by_layer: dict[int, tuple[int, ...]], keys: SinkKeys, watch: _Watch) -> None:
        self.by_layer, self.keys, self.watch = by_layer, keys, watch
        self.sums: dict[int, list[Tensor]] = {}
        self.samples: dict[int, list[Tensor]] = {}
        self.sink_samples: dict[int, list[Tensor]] = {}

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult:
        result = inner(call)
        heads = self.by_layer.get(call.site.layer)
        if heads is None:
            return result
        positions, _ = call.sink_positions(self.keys)
        mass = mass_on(result, self.keys)[..., : positions.shape[-1]]
        values = gather_keys(call.value, positions, call.heads).float()
        weight = self.watch.counted.to(mass)
        sink = einsum(mass, values, weight, "b h q n, b h n d, b q -> h d")
        output = einsum(result.output.float(), weight, "b h q d, b q -> h d")
        logit = _sink_score(call, self.keys)
        new = [sink, output, einsum(logit.nan_to_num(neginf=0.0), weight, "b h q, b q -> h"), weight.sum()]
        layer, index = call.site.layer, list(heads)
        self.sums[layer] = [a + b for a, b in zip(self.sums.get(layer, [torch.zeros(())] * 4), new, strict=True)]
        self._sample(layer, call.for_heads(heads), weight, logit[:, index])
        return result

    def _sample(self, layer: int, part: AttentionCall, weight: Tensor, logit: Tensor) -> None:
        """Scores of content keys at up to 16 counted queries a batch, in both gauges, ``[gauge, head, n]``."""
        spots = (weight > 0).any(0).nonzero().squeeze(-1)
        rows = spots[torch.linspace(0, len(spots) - 1, min(16, len(spots)), device=spots.device).round().long()]
        scores, visible = part.scores(rows), part.visible(rows)
        content = (visible & ~part.sink_mask(self.keys)).expand(scores.shape)
        gauges = torch.stack([scores, in_sink_gauge(scores, visible, part.sink_mask(self.keys))])
        kept = gauges.masked_fill(~content, torch.nan)
        self.samples.setdefault(layer, []).append(rearrange(kept, "g b h q k -> g h (b q k)").cpu())
        self.sink_samples.setdefault(layer, []).append(rearrange(logit[:, :, rows], "b h q -> h (b q)").cpu())

    def quantiles(self, layer: int) -> tuple[Tensor, Tensor]:
        """Candidate thresholds ``[gauge, candidate, head]`` and exits ``[candidate, head]``."""
        at = torch.tensor(_QUANTILES)
        # torch.quantile takes at most 2^24 numbers; a sample of a sample is enough for a grid.
        content = torch.cat(self.samples[layer], -1)
        content = content[..., :: max(1, content.shape[-1] // 200_000)]
        sinks = torch.cat(self.sink_samples[layer], -1)
        sinks = sinks.masked_fill(sinks.isneginf(), torch.nan)
        spread = torch.linspace(-8, 8, len(_QUANTILES))[:, None]
        return (rearrange(torch.nanquantile(content, at, -1), "c g h -> g c h"),
                sinks.nanmedian(-1).values.nan_to_num() + spread)  # fmt: skip

    def calibrations(self) -> dict[Head, HeadCalibration]:
        found = {}
        for layer, heads in self.by_layer.items():
            sink, output, logit, count = self.sums[layer]
            for head in heads:
                found[Head(layer, head)] = HeadCalibration(
                    sink[head] / count, output[head] / count, float(logit[head] / count)
                )
        return found


def _sink_score(call: AttentionCall, keys: SinkKeys) -> Tensor:
    """Log-sum-exp of the visible sink keys' scores, ``[batch, head, query]``; -inf where no sink key is visible."""
    parts = []
    for rows in row_blocks(call):
        scores = call.scores(rows)
        sinks = (call.visible(rows) & call.sink_mask(keys)).expand(scores.shape)
        parts.append(scores.masked_fill(~sinks, -torch.inf).logsumexp(-1))
    return torch.cat(parts, -1)


@dataclass(frozen=True, eq=False)
class _Grid:
    thresholds: Tensor
    exits: Tensor


class _Fitter:
    """Second and third pass: squared error of every candidate, as sums over tokens."""

    def __init__(
        self, by_layer: dict[int, tuple[int, ...]], grids: dict[int, _Grid], keys: SinkKeys, watch: _Watch
    ) -> None:
        self.by_layer, self.grids, self.keys, self.watch = by_layer, grids, keys, watch
        self.grams = {site.layer: gram(watch.backend.output_matrix(site))[list(by_layer[site.layer])]
                      for site in watch.backend.sites if site.layer in by_layer}  # fmt: skip
        # cross and square: [gauge, power, candidate, exponent, state, head]; energy and counts: [state, head].
        self.cross: dict[int, Tensor] = {}
        self.square: dict[int, Tensor] = {}
        self.energy: dict[int, Tensor] = {}
        self.count: dict[int, Tensor] = {}
        self.exit_error: dict[int, Tensor] = {}

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult:
        result = inner(call)
        layer = call.site.layer
        heads = self.by_layer.get(layer)
        if heads is None:
            return result
        part, index = call.for_heads(heads), list(heads)
        mass = mass_on(result, self.keys).sum(-1)[:, index]
        counted = self.watch.counted.to(mass)[:, None].expand(mass.shape)
        states = torch.stack([counted, counted * (mass >= DORMANT), counted * (mass <= ACTIVE)])
        target = result.output[:, index].float()
        gram_ = self.grams[layer]
        _add(self.energy, layer, einsum(_product(target, target, gram_), states, "b h q, s b h q -> s h"))
        _add(self.count, layer, einsum(states, "s b h q -> s h"))
        for rows in row_blocks(part):
            self._block(layer, part, rows, target[:, :, rows], states[:, :, :, rows], gram_)
        return result

    def _block(
        self, layer: int, part: AttentionCall, rows: slice, target: Tensor, states: Tensor, gram_: Tensor
    ) -> None:
        scores, visible, sinks = part.scores(rows), part.visible(rows), part.sink_mask(self.keys)
        content = (visible & ~sinks).expand(scores.shape)
        gauges = {"raw": scores, "sink": in_sink_gauge(scores, visible, sinks)}
        counts = count_visible(scores, visible).squeeze(-1).clamp(min=1.0)
        shrink = torch.stack([counts**-exponent for exponent in EXPONENTS])
        cross, square = [], []
        for gauge, thresholds in zip(GAUGES, self.grids[layer].thresholds.to(scores), strict=True):
            for power in POWERS:
                for threshold in thresholds:
                    raised = torch.relu(gauges[gauge] - threshold[:, None, None]).masked_fill(~content, 0.0)
                    output = part.mix(raised**power)
                    products = _product(output, target, gram_), _product(output, output, gram_)
                    cross.append(einsum(products[0], shrink, states, "b h q, e b h q, s b h q -> e s h"))
                    square.append(einsum(products[1], shrink**2, states, "b h q, e b h q, s b h q -> e s h"))
        shape = "(g p c) e s h -> g p c e s h"
        sizes = {"g": len(GAUGES), "p": len(POWERS)}
        _add(self.cross, layer, rearrange(torch.stack(cross), shape, **sizes))
        _add(self.square, layer, rearrange(torch.stack(square), shape, **sizes))
        hidden = scores.masked_fill(~content, -torch.inf)
        mass = hidden.logsumexp(-1)
        read = part.mix((hidden - mass.clamp(min=-1e30)[..., None]).exp().masked_fill(~content, 0.0))
        errors = []
        for logit in self.grids[layer].exits.to(scores):
            change = read * torch.sigmoid(mass - logit[:, None])[..., None] - target
            errors.append(einsum(_product(change, change, gram_), states[0], "b h q, b h q -> h"))
        _add(self.exit_error, layer, torch.stack(errors))

    def _explained(self, layer: int) -> Tensor:
        """Energy that each candidate explains at its best gain, ``[gauge, power, candidate, exponent, head]``."""
        cross, square = self.cross[layer][:, :, :, :, 0], self.square[layer][:, :, :, :, 0]
        return torch.where((cross > 0) & (square > 0), cross**2 / square.clamp(min=1e-30), 0.0)

    def _choose(self, layer: int) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
        """The best (gauge, candidate, exponent) of each head and power."""
        for power, of_power in enumerate(self._explained(layer).unbind(1)):
            for head, scored in enumerate(of_power.unbind(-1)):
                gauge, candidate, exponent = (int(i) for i in torch.unravel_index(scored.argmax(), scored.shape))
                yield power, head, (gauge, candidate, exponent)

    def finer(self, layer: int) -> _Grid:
        """A grid between the neighbours of the best candidate of each gauge, for plain and squared ReLU alike."""
        grid, explained = self.grids[layer], self._explained(layer).amax(3)
        parts = []
        for gauge in range(len(GAUGES)):
            both = [_between(grid.thresholds[gauge], explained[gauge, p].argmax(0)) for p in range(len(POWERS))]
            parts.append(torch.cat(both))
        return _Grid(torch.stack(parts), _between(grid.exits, self.exit_error[layer].argmin(0).cpu()))

    def best(self) -> tuple[dict[Head, dict[int, ReLUFit]], dict[Head, float]]:
        fits: dict[Head, dict[int, ReLUFit]] = {}
        exits = {}
        for layer, heads in self.by_layer.items():
            for power, row, (gauge, candidate, exponent) in self._choose(layer):
                where = gauge, power, candidate, exponent
                cross, square = self.cross[layer][where][:, row], self.square[layer][where][:, row]
                gain = float(cross[0].clamp(min=0) / square[0].clamp(min=1e-30))
                energy, count = self.energy[layer][:, row], self.count[layer][:, row]
                scale = (energy[0] / count[0].clamp(min=1)).clamp(min=1e-30)
                error = (energy - 2 * gain * cross + gain**2 * square) / count / scale
                normalizer = ReLU(
                    "visible", GAUGES[gauge], gain, float(self.grids[layer].thresholds[gauge, candidate, row]),
                    POWERS[power], EXPONENTS[exponent],
                )  # fmt: skip
                named = dict(zip(STATES, error.tolist(), strict=True))
                fits.setdefault(Head(layer, heads[row]), {})[POWERS[power]] = ReLUFit(normalizer, named)
            for row, head in enumerate(heads):
                exits[Head(layer, head)] = float(
                    self.grids[layer].exits[int(self.exit_error[layer][:, row].argmin()), row]
                )
        return fits, exits


def _add(sums: dict[int, Tensor], layer: int, new: Tensor) -> None:
    sums[layer] = sums[layer] + new.double().cpu() if layer in sums else new.double().cpu()


def _product(left: Tensor, right: Tensor, gram_: Tensor) -> Tensor:
    """Inner product after the output projection, ``x^T G_h y``, ``[batch, head, query]``."""
    return (torch.matmul(left, gram_.to(left)) * right).sum(-1)


def _between(candidates: Tensor, best: Tensor) -> Tensor:
    """Points between the neighbours of the best candidate of each head, the best one included, ``[n, head]``."""
    low = candidates.gather(0, (best - 1).clamp(min=0)[None].to(candidates.device))
    high = candidates.gather(0, (best + 1).clamp(max=len(candidates) - 1)[None].to(candidates.device))
    middle = candidates.gather(0, best[None].to(candidates.device))
    steps = torch.linspace(0, 1, _FINE)[:, None]
    return torch.cat([low + (middle - low) * steps[:-1], middle, middle + (high - middle) * steps[1:]])
