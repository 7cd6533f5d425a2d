"""Intervals: bootstraps over sequences, the only unit of inference here."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
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
    with warnings.catch_warnings():
        # A degenerate resample distribution gives NaN bounds, which is what is reported.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            (total, count),
            lambda t, c, axis: t.sum(axis) / c.sum(axis),
            paired=True, vectorized=True, n_resamples=resamples, confidence_level=confidence, method="BCa",
            rng=rng or np.random.default_rng(0),
        )  # fmt: skip
    return Interval(estimate, float(result.confidence_interval.low), float(result.confidence_interval.high))
