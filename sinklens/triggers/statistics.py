"""Statistics of trigger detection, vectorized over heads; the unit of inference is the sequence.

Arrays end in ``[sequence, position]`` and come with ``counted``, the tokens that take part. Strata are log-spaced bins
of position, because early tokens see fewer keys and a sink is easier to see there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import fft, sparse, stats

STRATA = 8
_TINY = 1e-12


def strata(counted: np.ndarray, bins: int = STRATA) -> np.ndarray:
    """Log-spaced position bin of every token, counted from the first counted token, ``[sequence, position]``."""
    place = np.maximum(counted.cumsum(-1), 1)
    edges = np.geomspace(1, place.max() + 1, bins + 1)[1:-1]
    return np.digitize(place, edges)


def residualize(score: np.ndarray, counted: np.ndarray, stratum: np.ndarray) -> np.ndarray:
    """``score [head, sequence, position]`` minus its mean in each position stratum; 0 where nothing is counted."""
    left = np.zeros_like(score, dtype=np.float32)
    for k in np.unique(stratum[counted]):
        here = counted & (stratum == k)
        left[:, here] = score[:, here] - score[:, here].mean(-1, keepdims=True)
    return left


# ---- two states -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Modes:
    """One Gaussian against a mixture of two, for each head.

    Attributes:
        bic_gain: BIC of one Gaussian minus BIC of the mixture; above 10 is strong evidence for two modes.
        separation: Ashman's D, ``sqrt(2) |m1 - m2| / sqrt(v1 + v2)``; above 2 the modes are apart.
    """

    bic_gain: np.ndarray
    separation: np.ndarray


def two_modes(score: np.ndarray, *, bins: int = 400, rounds: int = 200) -> Modes:
    """Fit one and two Gaussians to each row of ``score [head, token]`` by EM on a histogram.

    Sums over a histogram cost ``bins`` a round instead of one term a token; with 400 bins the likelihoods differ from
    those of the tokens by far less than the threshold of 10.
    """
    tokens = score.shape[1]
    low, high = score.min(1, keepdims=True), score.max(1, keepdims=True)
    width = np.maximum(high - low, 1e-6) / bins
    slot = np.minimum(((score - low) / width).astype(int), bins - 1)
    weight = np.stack([np.bincount(row, minlength=bins) for row in slot]).astype(float)
    x = low + (np.arange(bins) + 0.5) * width
    # A floor on the spread: a head that is constant must not win infinite likelihood with a spike.
    floor = np.maximum(width, 0.05) ** 2

    def moments(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total = np.maximum(w.sum(1, keepdims=True), _TINY)
        mean = (w * x).sum(1, keepdims=True) / total
        return mean, np.maximum((w * (x - mean) ** 2).sum(1, keepdims=True) / total, floor)

    def density(mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        return np.exp(-((x - mean) ** 2) / (2 * var)) / np.sqrt(2 * np.pi * var) + 1e-300

    mean, var = moments(weight)
    single = (weight * np.log(density(mean, var))).sum(1)
    share = (x > mean) * 1.0  # start: above and below the mean
    for _ in range(rounds):
        (m1, v1), (m2, v2) = moments(weight * (1 - share)), moments(weight * share)
        p2 = (weight * share).sum(1, keepdims=True) / tokens
        d1, d2 = (1 - p2) * density(m1, v1), p2 * density(m2, v2)
        share = d2 / (d1 + d2)
    double = (weight * np.log(d1 + d2)).sum(1)
    # Two parameters against five.
    gain = 2 * (double - single) - 3 * np.log(tokens)
    return Modes(gain, (np.sqrt(2) * np.abs(m1 - m2) / np.sqrt(v1 + v2))[:, 0])


# ---- effects --------------------------------------------------------------------------------------------------------


def risk_difference(exposed: np.ndarray, exposed_all: np.ndarray, other: np.ndarray, other_all: np.ndarray,
                    axis: int = -1) -> np.ndarray:  # fmt: skip
    """Mantel-Haenszel risk difference over strata.

    ``RD = sum_k (a_k n0_k - c_k n1_k) / N_k  /  sum_k n1_k n0_k / N_k`` with a of n1 exposed and c of n0 other tokens
    in the state, by stratum k along ``axis``. In [-1, 1]; NaN where no stratum holds both kinds.
    """
    total = np.maximum(exposed_all + other_all, 1)
    weight = (exposed_all * other_all / total).sum(axis)
    difference = ((exposed * other_all - other * exposed_all) / total).sum(axis)
    return np.where(weight > 0, difference / np.maximum(weight, _TINY), np.nan)


def pair_risk_differences(state: np.ndarray, tracks: np.ndarray, stratum: np.ndarray) -> np.ndarray:
    """Risk difference of every head and feature, ``[head, feature]``.

    Args:
        state: Bool ``[head, token]``.
        tracks: Bool ``[feature, token]``.
        stratum: ``[token]``.
    """
    parts = []
    for k in np.unique(stratum):
        here = stratum == k
        y, f = state[:, here].astype(np.float32), tracks[:, here].astype(np.float32)
        hit, exposed = y @ f.T, f.sum(1)[None]
        parts.append((hit, exposed + 0 * hit, y.sum(1)[:, None] - hit, here.sum() - exposed + 0 * hit))
    stacked = [np.stack(part, -1).astype(np.float64) for part in zip(*parts, strict=True)]
    return risk_difference(stacked[0], stacked[1], stacked[2], stacked[3])


def auroc(score: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Probability that a labelled token scores higher than another, ties half, for each row.

    Args:
        score: ``[head, token]``.
        labels: Bool, ``[head, token]`` or one row for all heads.

    Returns:
        ``[head]`` in 0..1; NaN with one kind of token only.
    """
    rank = stats.rankdata(score, axis=1)
    labels = np.broadcast_to(labels, score.shape)
    inside = labels.sum(1)
    outside = labels.shape[1] - inside
    u = (rank * labels).sum(1) - inside * (inside + 1) / 2
    return np.where((inside > 0) & (outside > 0), u / np.maximum(inside * outside, 1), np.nan)


@dataclass(frozen=True)
class Coverage:
    """How a set of triggers covers the tokens of a state: one row a head, counts by sequence and stratum.

    Attributes:
        counts: ``[sequence, head, stratum, 4]``: trigger tokens in the state, trigger tokens, other tokens in the
            state, other tokens.
    """

    counts: np.ndarray

    @classmethod
    def of(cls, state: np.ndarray, track: np.ndarray, counted: np.ndarray, stratum: np.ndarray) -> Coverage:
        """Count ``state`` and ``track``, both bool ``[head, sequence, position]``."""
        kinds = (state & track, track, state & ~track, ~track)
        bins = int(stratum.max()) + 1
        made = np.zeros((counted.shape[0], len(state), bins, 4))
        for k in range(bins):
            here = counted & (stratum == k)
            for column, kind in enumerate(kinds):
                made[:, :, k, column] = (kind & here).sum(-1).T
        return cls(made)


def coverage_numbers(totals: np.ndarray) -> dict[str, np.ndarray]:
    """Precision, recall, F1, risk difference from summed counts ``[..., stratum, 4]``; 0/0 := 0 except for the last."""
    hit, trigger, missed, _ = (totals[..., i].sum(-1) for i in range(4))
    return {
        "precision": hit / np.maximum(trigger, 1),
        "recall": hit / np.maximum(hit + missed, 1),
        "f1": 2 * hit / np.maximum(trigger + hit + missed, 1),
        "risk_difference": risk_difference(totals[..., 0], totals[..., 1], totals[..., 2], totals[..., 3]),
    }


# ---- intervals ------------------------------------------------------------------------------------------------------


def cluster_interval(counts: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], *, resamples: int = 2000,
                     confidence: float = 0.95, rng: np.random.Generator) -> tuple[np.ndarray, ...]:  # fmt: skip
    """BCa bootstrap over sequences of a statistic of summed counts, for all heads with the same resamples.

    Args:
        counts: ``[sequence, head, ...]``.
        statistic: From sums ``[..., head, ...]`` to numbers ``[..., head]``.
        resamples: Bootstrap size.
        confidence: Coverage aimed at.
        rng: Source of resamples.

    Returns:
        Estimate, lower and upper bound, each ``[head]``; NaN bounds with fewer than three sequences.

    Source: Efron 1987, as in ``scipy.stats.bootstrap``, which resamples one statistic at a time.
    """
    sequences = len(counts)
    estimate = statistic(counts.sum(0))
    if sequences < 3:
        return estimate, np.full_like(estimate, np.nan), np.full_like(estimate, np.nan)
    picks = rng.multinomial(sequences, np.full(sequences, 1 / sequences), size=resamples)
    draws = np.concatenate([
        statistic((block @ counts.reshape(sequences, -1)).reshape(-1, *counts.shape[1:]))
        for block in np.array_split(picks, max(1, resamples * counts[0].size // 2**23))
    ])  # fmt: skip
    below = (draws < estimate).mean(0) / 2 + (draws <= estimate).mean(0) / 2
    bias = stats.norm.ppf(np.clip(below, 1 / (resamples + 1), resamples / (resamples + 1)))
    left_out = statistic(counts.sum(0) - counts)
    away = np.nanmean(left_out, 0) - left_out
    acceleration = np.nansum(away**3, 0) / np.maximum(6 * np.nansum(away**2, 0) ** 1.5, _TINY)
    bounds = []
    for side in ((1 - confidence) / 2, (1 + confidence) / 2):
        z = bias + stats.norm.ppf(side)
        level = stats.norm.cdf(bias + z / (1 - acceleration * z))
        columns = (np.nanquantile(column, min(max(q, 0.0), 1.0)) if np.isfinite(column).any() else np.nan
                   for column, q in zip(draws.T, level, strict=True))  # fmt: skip
        bounds.append(np.fromiter(columns, float, len(level)))
    return estimate, bounds[0], bounds[1]


# ---- the null -------------------------------------------------------------------------------------------------------


class ShiftNull:
    """The circular-shift null: what a feature's effect would be if it stood elsewhere in the same sequence.

    A track is rotated within the counted stretch of each sequence by a random amount, at least ``min_shift`` either
    way; a draw uses the same shifts for all heads and features, so that their dependence is kept. Rotation keeps how
    often the feature occurs in each sequence and how it clusters. Statistic: ``sum of residual score over the track``.
    All rotations of a track come from one FFT.

    Args:
        residual: Position-residualized score ``[head, sequence, position]``, 0 where nothing is counted.
        counted: ``[sequence, position]``; the counted tokens of a sequence are consecutive.
        draws: How many draws.
        min_shift: Smallest rotation.
        rng: Source of shifts.
    """

    def __init__(self, residual: np.ndarray, counted: np.ndarray, *, draws: int, min_shift: int,
                 rng: np.random.Generator) -> None:  # fmt: skip
        lengths = counted.sum(-1)
        # A sequence too short for any shift keeps its place: it adds the same to the observed and to every draw.
        self.groups = [(n, np.flatnonzero(lengths == n)) for n in np.unique(lengths[lengths > 2 * min_shift])]
        self.counted = counted
        self.spectra, columns, offset = [], [], 0
        for n, rows in self.groups:
            stretch = residual[:, rows][:, counted[rows]].reshape(len(residual), len(rows), n)
            spectrum = fft.rfft(np.ascontiguousarray(stretch.transpose(1, 2, 0), dtype=np.float32), axis=1)
            self.spectra.append(spectrum)
            shifts = rng.integers(min_shift, n - min_shift, size=(draws, len(rows)), endpoint=True)
            columns.append(offset + np.arange(len(rows)) * n + shifts)
            offset += len(rows) * n
        self.draws = draws
        self.heads = len(residual)
        if not columns:
            self.selector = sparse.csr_matrix((draws, 0), dtype=np.float32)
            return
        index = np.concatenate(columns, 1)
        ones = np.ones(index.size, dtype=np.float32)
        starts = np.arange(draws + 1) * index.shape[1]
        self.selector = sparse.csr_matrix((ones, index.ravel(), starts), shape=(draws, offset))

    def sums(self, track: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Observed sums ``[head]``, null sums ``[draw, head]`` and their expectation ``[head]``.

        The expectation is over all rotations: the mean of the draws alone would lean away from the observed value,
        since rotations near it are never drawn, and a test around it rejects too often.

        Args:
            track: One track ``[sequence, position]``, or one a head ``[head, sequence, position]``.
        """
        tracks = track[None] if track.ndim == 2 else track
        observed, center, every = np.zeros(self.heads), np.zeros(self.heads), []
        for (n, rows), spectrum in zip(self.groups, self.spectra, strict=True):
            stretch = tracks[:, rows][:, self.counted[rows]].reshape(len(tracks), len(rows), n).transpose(1, 2, 0)
            other = fft.rfft(stretch.astype(np.float32), axis=1)
            # sums[s] = sum_t residual[t] track[t - s]
            shifted = fft.irfft(spectrum * other.conj(), n, axis=1)
            observed += shifted[:, 0].sum(0)
            center += shifted.mean(1).sum(0)
            every.append(shifted.reshape(-1, self.heads))
        if not every:
            return observed, np.zeros((self.draws, self.heads)), center
        return observed, self.selector @ np.concatenate(every), center


@dataclass(frozen=True)
class NullResult:
    """What the null said of every head and feature.

    Attributes:
        z: Observed effect in null standard deviations, ``[head, feature]``; positive where the score is higher.
        p: From the pooled studentized null, two-sided.
        p_max: Family-wise adjusted by the largest ``|z|`` of each draw.
    """

    z: np.ndarray
    p: np.ndarray
    p_max: np.ndarray


_BIN, _BINS = 0.01, 6000


def screen(null: ShiftNull, tracks: np.ndarray, tick: Callable[[], object] = lambda: None) -> NullResult:
    """Test every feature on every head against the circular-shift null.

    p-values come from the null of all heads and features pooled after studentizing each, which resolves far smaller
    values than one pair's draws; it assumes that studentized nulls have a common shape.
    """
    z = np.zeros((null.heads, len(tracks)))
    pooled, largest = np.zeros(_BINS + 1), np.zeros(null.draws)
    for column, track in enumerate(tracks):
        observed, sums, center = null.sums(track)
        spread = np.sqrt(((sums - center) ** 2).mean(0))
        usable = spread > 1e-6
        scale = np.where(usable, spread, np.inf)
        z[:, column] = (observed - center) / scale
        drawn = np.abs((sums - center) / scale)
        largest = np.maximum(largest, drawn.max(1))
        slots = np.minimum(drawn[:, usable] / _BIN, _BINS).astype(np.int64)
        pooled += np.bincount(slots.ravel(), minlength=_BINS + 1)
        tick()
    at_least = np.append(pooled[::-1].cumsum()[::-1], 0)
    slot = np.minimum(np.abs(z) / _BIN, _BINS).astype(int)
    p = (1 + at_least[slot]) / (1 + pooled.sum())
    exceeding = null.draws - np.searchsorted(np.sort(largest), np.abs(z), side="left")
    return NullResult(z, np.where(z == 0, 1.0, p), (1 + exceeding) / (1 + null.draws))


def one_sided(null: ShiftNull, tracks: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Permutation p-value of one track a head, ``[head]``: ``sign`` +1 where the score should be higher at the track.

    Exact for each head, ``(1 + draws at least as extreme) / (1 + draws)``.
    """
    observed, sums, _ = null.sums(tracks)
    slack = 1e-4 * np.maximum(np.abs(observed), 1)  # float32 FFT: a draw equal to the observed must count
    return (1 + (sums * sign >= observed * sign - slack).sum(0)) / (1 + null.draws)
