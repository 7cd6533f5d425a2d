"""Statistics against hand counts, brute force, and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sinklens.triggers.statistics import (
    Coverage,
    ShiftNull,
    auroc,
    cluster_interval,
    coverage_numbers,
    one_sided,
    pair_risk_differences,
    residualize,
    risk_difference,
    screen,
    strata,
    two_modes,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_risk_difference_by_hand() -> None:
    # stratum 1: 8/10 against 2/10; stratum 2: 1/2 against 9/18
    made = risk_difference(np.array([8, 1]), np.array([10, 2]), np.array([2, 9]), np.array([10, 18]))
    assert made == pytest.approx((0.6 * 5 + 0.0 * 1.8) / (5 + 1.8))
    assert np.isnan(risk_difference(np.array([1]), np.array([1]), np.array([0]), np.array([0])))


def test_stratification_removes_position() -> None:
    """State and feature both depend on position and on nothing else: raw difference large, stratified none."""
    late = np.repeat([False, True], 5000)
    draw = rng()
    state = draw.random(10000) < np.where(late, 0.9, 0.1)
    feature = draw.random(10000) < np.where(late, 0.9, 0.1)
    made = pair_risk_differences(state[None], feature[None], late.astype(int))[0, 0]
    raw = state[feature].mean() - state[~feature].mean()
    assert raw > 0.6
    assert abs(made) < 0.05


def test_auroc_is_mann_whitney() -> None:
    score, labels = rng().normal(size=(3, 200)).round(1), rng(1).random((3, 200)) < 0.3
    for row in range(3):
        u = stats.mannwhitneyu(score[row][labels[row]], score[row][~labels[row]]).statistic
        expected = u / (labels[row].sum() * (~labels[row]).sum())
        assert auroc(score, labels)[row] == pytest.approx(expected)
    assert np.isnan(auroc(score, np.zeros(200, dtype=bool))).all()


def test_two_modes_and_one() -> None:
    draw = rng()
    one = draw.normal(size=4000)
    two = np.concatenate([draw.normal(-4, 1, 3000), draw.normal(4, 1, 1000)])
    made = two_modes(np.stack([one, two, np.zeros(4000)]))
    assert made.bic_gain[0] < 10
    assert made.bic_gain[1] > 1000
    assert made.separation[1] == pytest.approx(8, abs=0.3)
    assert made.bic_gain[2] < 10


def test_coverage_by_hand() -> None:
    counted = np.array([[False, True, True, True]])
    state = np.array([[[True, True, False, True]]])
    track = np.array([[[True, True, True, False]]])
    made = Coverage.of(state, track, counted, np.zeros((1, 4), dtype=int))
    assert made.counts[0, 0, 0].tolist() == [1, 2, 1, 1]
    numbers = coverage_numbers(made.counts.sum(0))
    assert numbers["precision"][0] == 0.5
    assert numbers["recall"][0] == 0.5
    assert numbers["f1"][0] == 0.5
    assert numbers["risk_difference"][0] == pytest.approx(0.5 - 1.0)


def test_cluster_interval_agrees_with_scipy() -> None:
    draw = rng()
    counts = draw.integers(5, 30, size=(40, 2)).astype(float)
    totals = counts * draw.beta(2, 5, size=(40, 2))
    both = np.stack([totals, counts], -1)
    estimate, low, high = cluster_interval(both, lambda t: t[..., 0] / t[..., 1], resamples=20000, rng=rng(1))
    for head in range(2):
        theirs = stats.bootstrap(
            (totals[:, head], counts[:, head]), lambda t, c, axis: t.sum(axis) / c.sum(axis), paired=True,
            n_resamples=20000, rng=rng(2),
        ).confidence_interval  # fmt: skip
        assert estimate[head] == pytest.approx(totals[:, head].sum() / counts[:, head].sum())
        assert low[head] == pytest.approx(theirs.low, abs=2e-3)
        assert high[head] == pytest.approx(theirs.high, abs=2e-3)


def test_cluster_interval_covers() -> None:
    """400 studies of 40 clusters: the interval holds the truth about as often as it says."""
    draw = rng(3)
    rate = draw.beta(2, 3, size=(40, 400))
    hits = draw.binomial(20, rate)
    both = np.stack([hits, np.full_like(hits, 20)], -1).astype(float)
    _, low, high = cluster_interval(both, lambda t: t[..., 0] / t[..., 1], rng=rng(4))
    assert 0.9 < ((low < 0.4) & (high > 0.4)).mean() < 0.98


class TestShiftNull:
    def made(self, draws: int = 50, min_shift: int = 8) -> tuple[np.ndarray, np.ndarray, ShiftNull]:
        counted = np.zeros((4, 60), dtype=bool)
        for row, (start, stop) in enumerate([(8, 60), (8, 60), (20, 60), (8, 18)]):
            counted[row, start:stop] = True
        residual = np.where(counted, rng().normal(size=(3, 4, 60)), 0).astype(np.float32)
        return counted, residual, ShiftNull(residual, counted, draws=draws, min_shift=min_shift, rng=rng(5))

    def test_every_draw_against_brute_force(self) -> None:
        counted, residual, null = self.made()
        track = rng(6).random((4, 60)) < 0.2
        observed, sums, center = null.sums(track)
        usable = [0, 1, 2]  # the last sequence has 10 counted tokens: no shift of 8 either way
        np.testing.assert_allclose(observed, (residual[:, usable] * (track & counted)[usable]).sum((1, 2)), atol=1e-4)
        flat = sum(residual[:, row, counted[row]].mean(-1) * (track & counted)[row].sum() for row in usable)
        np.testing.assert_allclose(center, flat, atol=1e-4)
        picks = null.selector.indices.reshape(50, 3)
        starts = {2: 0, 0: 40, 1: 92}  # sequences in the order of their lengths
        for draw in range(0, 50, 7):
            expected = np.zeros(3)
            for column, row in enumerate([2, 0, 1]):
                shift = picks[draw, column] - starts[row]
                length = counted[row].sum()
                assert 8 <= shift <= length - 8
                expected += residual[:, row, counted[row]] @ np.roll(track[row, counted[row]], shift)
            np.testing.assert_allclose(sums[draw], expected, atol=1e-4)

    def test_one_track_a_head_equals_shared_tracks(self) -> None:
        null = self.made()[-1]
        track = rng(6).random((4, 60)) < 0.2
        shared, own = null.sums(track), null.sums(np.broadcast_to(track, (3, 4, 60)))
        np.testing.assert_allclose(shared[1], own[1], atol=1e-4)

    def test_it_finds_what_is_there_and_nothing_else(self) -> None:
        counted = np.ones((30, 100), dtype=bool)
        score, tracks = rng(1).normal(size=(5, 30, 100)), rng(2).random((8, 30, 100)) < 0.1
        score[2] -= 2.0 * tracks[3]
        residual = residualize(score, counted, strata(counted))
        made = screen(ShiftNull(residual, counted, draws=500, min_shift=8, rng=rng(3)), tracks)
        assert np.argwhere(made.p_max < 0.01).tolist() == [[2, 3]]
        assert made.z[2, 3] < -10
        p = one_sided(
            ShiftNull(residual, counted, draws=500, min_shift=8, rng=rng(3)),
            np.broadcast_to(tracks[3], score.shape),
            np.full(5, -1.0),
        )
        assert p[2] == pytest.approx(1 / 501)
        assert (np.delete(p, 2) > 0.02).all()

    def test_pooled_p_values_are_uniform_without_an_effect(self) -> None:
        counted = np.ones((30, 100), dtype=bool)
        noise = rng(7).normal(size=(40, 30, 102))
        score = noise[..., 2:] + noise[..., 1:-1] + noise[..., :-2]  # neighbours depend on each other
        tracks = rng(8).random((50, 30, 100)) < 0.1
        residual = residualize(score, counted, strata(counted))
        p = screen(ShiftNull(residual, counted, draws=300, min_shift=8, rng=rng(9)), tracks).p
        assert 0.035 < (p < 0.05).mean() < 0.065
        assert 0.003 < (p < 0.01).mean() < 0.018

    def test_sequences_too_short_to_shift_show_nothing(self) -> None:
        null = self.made(min_shift=40)[-1]
        made = screen(null, rng(6).random((2, 4, 60)) < 0.2)
        assert (made.z == 0).all()
        assert (made.p == 1).all()
