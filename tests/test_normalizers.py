"""Every normalizer: hand-checked rows, then laws that all of them obey."""

from __future__ import annotations

import math

import pytest
import torch

import sinklens as sl
from sinklens.errors import InputError
from sinklens.normalizers import HideSink, Normalizer, SumToOne

D = 8
ALL: list[Normalizer] = [
    sl.Softmax(), sl.ReLU(), sl.ReLU(scale="visible"), sl.ReLU.paper(), sl.ReLU(gauge="sink", gain=2.0, threshold=0.5),
    sl.ReLU(power=2), sl.SoftmaxPlusOne(), sl.LearnedSink(0.3), sl.Softpick(), sl.Sigmoid(), sl.Sigmoid(-1.0),
    sl.Sparsemax(), sl.Entmax15(), sl.DropSink(), sl.DropSink(sl.ReLU(gauge="sink")), sl.RenormalizeWithoutSink(),
    sl.RenormalizeWithoutSink(sl.ReLU(gauge="sink")), sl.MeanSink(torch.ones(D)), sl.DropHeaviest(),
    sl.DropHeaviest(renormalize=True), HideSink(sl.LearnedSink(0.3)), SumToOne(sl.ReLU(gain=0.5)), sl.Constant(), sl.Constant(torch.ones(D)), sl.Mix(sl.RenormalizeWithoutSink(), 0.3),
]  # fmt: skip
SUM_TO_ONE = (sl.Softmax, sl.Sparsemax, sl.Entmax15)

Z = torch.tensor([2.0, 1.0, -1.0, 5.0])
SEEN = torch.tensor([True, True, True, False])
SINK = torch.tensor([True, False, False, False])


def name(normalizer: Normalizer) -> str:
    return repr(normalizer)[:48]


E2, E1, EM = math.exp(2), math.exp(1), math.exp(-1)
BY_HAND: list[tuple[Normalizer, list[float]]] = [
    (sl.Softmax(), [E2 / (E2 + E1 + EM), E1 / (E2 + E1 + EM), EM / (E2 + E1 + EM), 0]),
    (sl.SoftmaxPlusOne(), [E2 / (1 + E2 + E1 + EM), E1 / (1 + E2 + E1 + EM), EM / (1 + E2 + E1 + EM), 0]),
    (sl.LearnedSink(2.0), [E2 / (2 * E2 + E1 + EM), E1 / (2 * E2 + E1 + EM), EM / (2 * E2 + E1 + EM), 0]),
    (sl.ReLU(), [2, 1, 0, 0]),
    (sl.ReLU(scale="visible"), [2 / 3, 1 / 3, 0, 0]),
    (sl.ReLU.paper(), [1, 0.5, 0, 0]),
    (sl.ReLU(power=2, gain=3), [12, 3, 0, 0]),
    (sl.ReLU(gauge="sink", threshold=-2), [2, 1, 0, 0]),
    (sl.ReLU(scale="visible", count_exponent=0.5), [2 / math.sqrt(3), 1 / math.sqrt(3), 0, 0]),
    (sl.Sigmoid(0.0), [1 / (1 + 1 / E2), 1 / (1 + 1 / E1), 1 / (1 + E1), 0]),
    (sl.Softpick(0.0), [(E2 - 1) / (E2 + E1 - 1 - EM), (E1 - 1) / (E2 + E1 - 1 - EM), 0, 0]),
    (sl.Sparsemax(), [1, 0, 0, 0]),
    (sl.DropSink(), [0, E1 / (E2 + E1 + EM), EM / (E2 + E1 + EM), 0]),
    (sl.RenormalizeWithoutSink(), [0, E1 / (E1 + EM), EM / (E1 + EM), 0]),
    (sl.DropHeaviest(), [E2 / (E2 + E1 + EM), 0, EM / (E2 + E1 + EM), 0]),
    (sl.DropHeaviest(True), [E2 / (E2 + EM), 0, EM / (E2 + EM), 0]),
    (sl.Constant(), [0, 0, 0, 0]),
    (HideSink(sl.LearnedSink(0.0)), [0, E1 / (1 + E1 + EM), EM / (1 + E1 + EM), 0]),
    (SumToOne(sl.ReLU()), [2 / 3, 1 / 3, 0, 0]),
    (sl.RenormalizeWithoutSink(sl.ReLU()), [0, 1, 0, 0]),
]


@pytest.mark.parametrize(
    ("normalizer", "row"), BY_HAND, ids=lambda value: name(value) if isinstance(value, Normalizer) else ""
)
def test_a_row_worked_out_by_hand(normalizer: Normalizer, row: list[float]) -> None:
    torch.testing.assert_close(
        normalizer.weights(Z, SEEN, SINK), torch.tensor(row, dtype=torch.float32), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("normalizer", ALL, ids=name)
class TestLaws:
    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)) * 3
        visible = torch.arange(7) <= torch.arange(1, 6)[:, None]
        return scores, visible[None, None], (torch.arange(7) == 0)[None, None, None]

    def test_invisible_keys_get_nothing_whatever_their_score(self, normalizer: Normalizer) -> None:
        scores, visible, sinks = self.rows()
        weights = normalizer.weights(scores, visible, sinks)
        assert weights.dtype == torch.float32
        assert not weights.masked_select(~visible).any()
        for junk in (torch.finfo(torch.float32).min, 1e4):
            torch.testing.assert_close(normalizer.weights(scores.masked_fill(~visible, junk), visible, sinks), weights)

    def test_a_row_that_sees_nothing_is_zero(self, normalizer: Normalizer) -> None:
        scores, visible, sinks = self.rows()
        weights = normalizer.weights(scores, torch.zeros_like(visible), sinks)
        assert torch.equal(weights, torch.zeros_like(scores))

    def test_a_block_of_rows_is_a_block_of_the_whole(self, normalizer: Normalizer) -> None:
        scores, visible, sinks = self.rows()
        whole = normalizer.weights(scores, visible, sinks)
        torch.testing.assert_close(normalizer.weights(scores[:, :, 2:4], visible[:, :, 2:4], sinks), whole[:, :, 2:4])

    def test_shift_invariance_is_as_declared(self, normalizer: Normalizer) -> None:
        scores, visible, sinks = self.rows()
        same = torch.allclose(
            normalizer.weights(scores, visible, sinks), normalizer.weights(scores + 2, visible, sinks), atol=1e-5
        )
        if normalizer.shift_invariant:
            assert same
        if (
            isinstance(normalizer, (sl.SoftmaxPlusOne, sl.LearnedSink, sl.Softpick, sl.Sigmoid))
            or normalizer == sl.ReLU()
        ):
            assert not same

    def test_sums(self, normalizer: Normalizer) -> None:
        scores, visible, sinks = self.rows()
        total = normalizer.weights(scores, visible, sinks).sum(-1)
        if isinstance(normalizer, SUM_TO_ONE):
            torch.testing.assert_close(total, torch.ones_like(total))
        if isinstance(normalizer, (sl.SoftmaxPlusOne, sl.LearnedSink, sl.Softpick)):
            assert bool((total <= 1 + 1e-6).all())

    def test_large_scores_do_not_overflow(self, normalizer: Normalizer) -> None:
        scores, visible, sinks = self.rows()
        assert bool(normalizer.weights(scores * 1e3, visible, sinks).isfinite().all())


def test_dropping_the_sink_is_softmax_plus_one_in_the_sink_gauge() -> None:
    """Identity 2 of the science notes: exact, not approximate."""
    scores, visible, sinks = TestLaws().rows()
    gauged = scores - scores[..., :1]
    dropped = sl.DropSink().weights(scores, visible, sinks)
    # In the sink gauge the sink's own term is exp(0) = 1: it is the 1 of softmax-plus-one over the content.
    plus_one = sl.SoftmaxPlusOne().weights(gauged, visible & ~sinks, sinks)
    torch.testing.assert_close(dropped, plus_one, atol=1e-6, rtol=1e-5)


def test_matched_keys_weigh_as_much_as_the_sink() -> None:
    scores = torch.randn(1, 1, 1, 400, generator=torch.Generator().manual_seed(0))
    scores[..., 0] = 5.0
    visible, sinks = torch.ones(400, dtype=torch.bool), torch.arange(400) == 0
    plain = sl.Softmax().weights(scores, visible, sinks)
    gone = plain - sl.DropMatched().weights(scores, visible, sinks)
    # One key more or less is what the order allows.
    assert abs(float(gone.sum() - plain[..., 0].sum())) <= float(plain[..., 1:].max())
    assert float(gone[..., 0].sum()) == 0
    # Where the sink outweighs all content, all content goes.
    scores[..., 0] = 12.0
    left = sl.DropMatched(renormalize=True).weights(scores, visible, sinks)
    torch.testing.assert_close(left[..., 0].sum(), torch.tensor(1.0))


def test_rows_without_the_sink_keep_the_raw_gauge() -> None:
    seen = torch.tensor([False, True, True, False])
    torch.testing.assert_close(sl.ReLU(gauge="sink").weights(Z, seen, SINK), torch.tensor([0.0, 1.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sl.ReLU(scale="keys"), "unknown count: expected 'none', 'visible' or 'content', got 'keys'"),
        (lambda: sl.ReLU(gauge="median"), "unknown gauge: expected 'raw' or 'sink'"),
        (lambda: sl.ReLU(power=0), "power > 0, got 0"),
    ],
)
def test_nonsense_is_refused(make: object, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make()  # type: ignore[operator]
