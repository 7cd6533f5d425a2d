"""Intervals: bootstraps over sequences, the only unit of inference here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from sinklens.errors import InputError


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float


def ratio_interval(
    totals: ArrayLike,
    counts: ArrayLike,
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    rng: np.random.Generator | None = None,
) -> Interval:
    """Interval of a mean over tokens, ``sum totals / sum counts``, by BCa bootstrap over sequences.

    Paired quantities (the effect of an intervention on the same tokens) are differenced before they come here, so that
    resampling a sequence resamples both sides together.

    Args:
        totals: Sum over the counted tokens of each sequence, ``[sequence]``.
        counts: Number of counted tokens of each sequence; sequences without any are left out.
        resamples: Bootstrap size.
        confidence: Coverage aimed at, in (0, 1).
        rng: Source of resamples; a fixed seed by default.

    Returns:
        Estimate and interval; NaN throughout without any token, NaN bounds with fewer than three sequences.
    """
    total, count = np.asarray(totals, dtype=float), np.asarray(counts, dtype=float)
    if total.shape != count.shape or total.ndim != 1:
        raise InputError("totals and counts list the same sequences", expected=f"{count.shape}", got=f"{total.shape}")
    total, count = total[count > 0], count[count > 0]
    if not len(count):
        return Interval(np.nan, np.nan, np.nan)
    estimate = float(total.sum() / count.sum())
    if len(count) < 3:
        return Interval(estimate, np.nan, np.nan)
    if np.ptp(total / count) == 0:
        return Interval(estimate, estimate, estimate)
    return paired_interval(
        lambda t, c, axis=-1: t.sum(axis) / c.sum(axis),
        total,
        count,
        resamples=resamples,
        confidence=confidence,
        rng=rng,
    )


def paired_interval(
    statistic: Callable[..., NDArray[np.float64]],
    *samples: NDArray[np.float64],
    resamples: int = 2000,
    confidence: float = 0.95,
    rng: np.random.Generator | None = None,
) -> Interval:
    """BCa interval of any statistic of several sums by sequence, resampling the sequences of all of them together.

    Args:
        statistic: ``statistic(*samples, axis)``, vectorized over the other axes.
        *samples: One number a sequence each, ``[sequence]``, the same sequences in the same order.
        resamples: Bootstrap size.
        confidence: Coverage aimed at, in (0, 1).
        rng: Source of resamples; a fixed seed by default.
    """
    estimate = float(statistic(*samples, axis=-1))
    if len(samples[0]) < 3:
        return Interval(estimate, np.nan, np.nan)

    def bounds(method: str) -> tuple[float, float]:
        result = stats.bootstrap(
            samples, statistic, paired=len(samples) > 1, vectorized=True, n_resamples=resamples,
            confidence_level=confidence, method=method, rng=rng or np.random.default_rng(0),
        )  # fmt: skip
        return float(result.confidence_interval.low), float(result.confidence_interval.high)

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        low, high = bounds("BCa")
        # BCa has no answer where leaving a sequence out changes nothing; percentiles have.
        return Interval(estimate, *(bounds("percentile") if np.isnan(low + high) else (low, high)))
