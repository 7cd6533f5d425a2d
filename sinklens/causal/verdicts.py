"""The verdict: what a head's effects, taken together, say about normalization as the reason for its sink.

A head *supports* the hypothesis if all five hold, measured at dormant tokens by changing the head there only, and at
active tokens by changing it there only (``m``: the margin, 5 % of the cost of mean-ablation, at least .001 nats):

- **N1 silence**: silencing it at its dormant tokens costs less than m.
- **N2 function**: silencing it at its active tokens costs more than m.
- **N3 value**: dropping the sink costs less than m in both states.
- **N4 forced read-out**: on dormant tokens dropping and renormalizing costs more than 3 times dropping, and by
  more than the same pair costs on the heaviest content key.
- **N5 function without normalization**: the fitted ReLU without a sink costs less than m on dormant tokens, and on
  active tokens less than .2 (*fully*) or .5 (*partly*) of silencing.

A head that does most of its work at tokens between the two states is *graded*, whatever else holds.
Effects "less than" are equivalence tests (one-sided, 95 %). Support over many heads is Holm-adjusted: the p-value of a
head is the largest of its five, since all must hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.multitest import multipletests

from sinklens.causal.contrasting import FEWEST, Contrast
from sinklens.errors import InputError
from sinklens.measures import Interval, paired_interval
from sinklens.table import HeadTable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MARGIN_SHARE, MARGIN_NATS = 0.05, 1e-3
FORCED = math.log(3)
FULLY, PARTLY = 0.2, 0.5
ALPHA = 0.05

_TINY = 1e-7

MEANINGS = {
    "supports fully": "silent where dormant, needed where active, sink value not needed, harmed by a forced read-out, "
    "and a ReLU without a sink does its work",
    "supports partly": "the same, but the fitted ReLU does only part of its work",
    "kernel": "all but the last: no ReLU that was tried does its work; the shape of the kernel matters",
    "always dormant": "it never wakes on this text, so it survives any silent replacement: no evidence either way",
    "redundant": "silencing it where it is active costs nothing: no evidence either way",
    "constant bias": "its sink's value is needed, but a constant does as well",
    "broadcast": "its sink's value is needed and varies: the sink carries a message",
    "graded": "it works in proportion: mostly at tokens between dormant and active, or at dormant ones too",
    "not forced": "renormalizing does not hurt it more than dropping: normalization does not bind here",
    "no sink": "it has no dormant tokens on this text",
    "undecided": "the intervals allow more than one reading",
}
"""Every verdict in words."""


class Verdicts(HeadTable):
    """One row a head: the verdict, the five findings, and the numbers they rest on."""

    kind: ClassVar[str] = "verdicts"
    units: ClassVar[Mapping[str, str]] = {
        "layer": "index from 0",
        "head": "query head, from 0",
        "verdict": "see settings",
        "n1": "silence: True, False, or missing where it cannot be tested",
        "n2": "function",
        "n3": "value not needed",
        "n4": "forced read-out hurts",
        "n5": "function without normalization or sink",
        "e4": "KL(fitted ReLU) / KL(silence) on active tokens",
        "log_ratio": "log KL(drop, renormalize) / KL(drop) on dormant tokens",
        "dd": "forced read-out's cost minus the same for the heaviest content key, nats",
        "margin": "nats; below it an effect counts as none",
        "between": "share of the head's work done at tokens between dormant and active, 0..1",
        "z_dormant": "KL of silencing on dormant tokens, nats",
        "z_active": "KL of silencing on active tokens, nats",
        "c1_dormant": "KL of dropping the sink on dormant tokens, nats",
        "c1_active": "KL of dropping the sink on active tokens, nats",
        "c1m_dormant": "KL of sink -> its mean on dormant tokens, nats",
        "c4_dormant": "KL of the fitted ReLU on dormant tokens, nats",
        "power": "of the fitted ReLU",
        "sink_mass": "mean weight on the sink, 0..1",
        "dormant": "share of tokens, 0..1",
        "active": "share of tokens, 0..1",
        "p": "largest of the five one-sided p-values",
        "p_holm": "the same, adjusted over the heads",
    }

    def reading(self) -> str:
        counts = self.frame.verdict.value_counts()
        named = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return f"{len(self.frame)} heads: {named}."

    def plot(self) -> Figure:
        """Verdicts on the layer-by-head map; see :func:`sinklens.plots.verdict_map`."""
        from sinklens.plots import verdict_map

        return verdict_map(self)


@dataclass(frozen=True)
class _Claim:
    """A one-sided claim about a number: its interval, whether it holds, and its p-value."""

    interval: Interval
    holds: bool | None
    p: float


_UNTESTED = _Claim(Interval(math.nan, math.nan, math.nan), None, math.nan)


def judge(contrast: Contrast) -> Verdicts:
    """Give every tested head its verdict.

    Args:
        contrast: A contrast run with ``judge=True``.

    Raises:
        InputError: The contrast lacks what a verdict needs.
    """
    if not contrast.settings.get("judge"):
        raise InputError("a verdict needs the interventions done state by state", expected="contrast(..., judge=True)",
                         got="judge=False")  # fmt: skip
    evidence = [_Evidence(contrast, str(head)) for head in contrast.heads]
    frame = pd.DataFrame([item.row() for item in evidence])
    frame["layer"], frame["head"] = zip(*contrast.heads, strict=True)
    frame["p_holm"] = np.nan
    tested = frame.p.notna()
    if tested.any():
        frame.loc[tested, "p_holm"] = multipletests(frame.p[tested], method="holm")[1]
    lost = frame.verdict.str.startswith("supports") & ~(frame.p_holm < ALPHA)
    frame.loc[lost, "reason"] = "support does not survive the adjustment for the number of heads tested"
    frame.loc[lost, "verdict"] = "undecided"
    order = [name for name in Verdicts.units if name in frame]
    frame = frame[[*order, *(name for name in frame if name not in order)]]
    settings = {
        "meanings": MEANINGS, "margin_share": MARGIN_SHARE, "margin_nats": MARGIN_NATS, "forced": FORCED,
        "fully": FULLY, "partly": PARTLY, "alpha": ALPHA, "caveats": list(contrast.settings["caveats"]),
    }  # fmt: skip
    return Verdicts(frame, settings, contrast.provenance)


class _Evidence:
    """The sums of one head, and the claims that rest on them."""

    def __init__(self, contrast: Contrast, unit: str) -> None:
        totals = contrast.frames["totals"]
        mine = totals[totals["heads"] == unit]
        self.groups = {
            key: group.sort_values("sequence") for key, group in mine.groupby(["intervention", "at", "tokens"])
        }
        shares = contrast.frames["shares"]
        self.shares = shares[shares["heads"] == unit].set_index("tokens")
        self.resamples, self.seed = contrast.settings["resamples"], contrast.settings["seed"]
        self.power = self._power(contrast, unit)

    def _power(self, contrast: Contrast, unit: str) -> int:
        """Plain or squared ReLU, whichever fitted the calibration tokens better: never chosen on the test."""
        fits = contrast.frames["fits"]
        layer, head = self.shares.layer.iloc[0], self.shares["head"].iloc[0]
        mine = fits[(fits.layer == layer) & (fits["head"] == head)].set_index("power")
        error = mine.error_active.where(mine.error_active.notna(), mine.error_all)
        return int(error.idxmin())

    def kl(self, intervention: str, state: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Sums of KL and counts of tokens by sequence, done at that state's tokens only; None if there are too few."""
        group = self.groups.get((intervention, state, state))
        if group is None or group["count"].sum() < FEWEST or (group["count"] > 0).sum() < 3:
            return None
        used = group["count"].to_numpy() > 0
        # An effect of nothing is rounding noise around 0.
        return group.kl.to_numpy()[used].clip(0.0), group["count"].to_numpy()[used].astype(float)

    def interval(self, statistic: Callable[..., Any], *samples: np.ndarray, confidence: float = 0.95) -> Interval:
        return paired_interval(statistic, *samples, resamples=self.resamples, confidence=confidence,
                               rng=np.random.default_rng(self.seed))  # fmt: skip

    def mean(self, intervention: str, state: str) -> float:
        sums = self.kl(intervention, state)
        return math.nan if sums is None else float(sums[0].sum() / sums[1].sum())

    def margin(self) -> float:
        """5 % of what mean-ablation costs where the head is active, at least .001 nats."""
        cost = self.mean("Mn", "active")
        return max(MARGIN_NATS, 0.0 if math.isnan(cost) else MARGIN_SHARE * cost)

    def below(self, intervention: str, state: str, margin: float) -> _Claim:
        """The effect is smaller than the margin (one-sided equivalence)."""
        return self._against(intervention, state, margin, below=True)

    def above(self, intervention: str, state: str, margin: float) -> _Claim:
        """The effect is larger than the margin."""
        return self._against(intervention, state, margin, below=False)

    def _against(self, intervention: str, state: str, margin: float, *, below: bool) -> _Claim:
        sums = self.kl(intervention, state)
        if sums is None:
            return _UNTESTED
        interval = self.interval(_mean, *sums, confidence=1 - 2 * ALPHA)
        holds = interval.high < margin if below else interval.low > margin
        # On a log scale: KL is positive and skewed.
        value = np.log((sums[0] / sums[1]).clip(_TINY))
        return _Claim(
            interval, holds, _p(math.log(max(interval.estimate, _TINY)) - math.log(margin), value, below=below)
        )

    def forced(self) -> tuple[_Claim, _Claim]:
        """Log ratio of C2 to C1 above log 3, and D1 above the same difference for the heaviest content key."""
        parts = [self.kl(name, "dormant") for name in ("C2", "C1", "R2", "R1")]
        if any(part is None for part in parts):
            return _UNTESTED, _UNTESTED
        (c2, count), (c1, _), (r2, _), (r1, _) = (part for part in parts if part is not None)
        ratio = self.interval(_log_ratio, c2, c1)
        difference = self.interval(_mean, (c2 - c1) - (r2 - r1), count)
        logs = np.log((c2 / count + _TINY) / (c1 / count + _TINY))
        each = ((c2 - c1) - (r2 - r1)) / count
        return (
            _Claim(ratio, ratio.low > FORCED, _p(ratio.estimate - FORCED, logs, below=False)),
            _Claim(difference, difference.low > 0, _p(difference.estimate, each, below=False)),
        )

    def replaced(self) -> _Claim:
        """E4: what the fitted ReLU costs on active tokens, in units of silencing; ``holds`` is its upper end < .5."""
        fitted, silent = self.kl(self.fitted, "active"), self.kl("Z", "active")
        if fitted is None or silent is None:
            return _UNTESTED
        ratio = self.interval(_ratio, fitted[0], silent[0])
        logs = np.log((fitted[0] + _TINY) / (silent[0] + _TINY))
        return _Claim(ratio, ratio.high < PARTLY, _p(math.log(max(ratio.estimate, _TINY) / PARTLY), logs, below=True))

    def between(self) -> float:
        """Share of the head's work (KL of silencing, summed) that it does at tokens between dormant and active."""
        sums = [self.kl("Z", state) for state in ("dormant", "active", "mixed")]
        work = [0.0 if part is None else float(part[0].sum()) for part in sums]
        return work[2] / sum(work) if sum(work) > 0 else math.nan

    @property
    def fitted(self) -> str:
        return "C4f" if self.power == 1 else "C4f2"

    def row(self) -> dict[str, Any]:
        margin = self.margin()
        silence, function = self.below("Z", "dormant", margin), self.above("Z", "active", margin)
        dropped = [self.below("C1", state, margin) for state in ("dormant", "active")]
        mean = [self.below("C1m", state, margin) for state in ("dormant", "active")]
        ratio, specific = self.forced()
        quiet, replaced = self.below(self.fitted, "dormant", margin), self.replaced()
        n3, n4 = _all(*dropped), _all(ratio, specific)
        n5 = _all(quiet, replaced)
        verdict, reason = self._verdict(silence, function, n3, _all(*mean), n4, ratio, n5, replaced, margin)
        claims = (silence, function, *dropped, ratio, specific, quiet, replaced)
        p = max(claim.p for claim in claims) if all(claim.holds is not None for claim in claims) else math.nan
        numbers: dict[str, Any] = {
            "verdict": verdict, "reason": reason, "n1": silence.holds, "n2": function.holds, "n3": n3, "n4": n4,
            "n5": n5, "margin": margin, "between": self.between(), "c1m_dormant": mean[0].interval.estimate,
            "c1_active": dropped[1].interval.estimate, "power": self.power, "p": p,
            "sink_mass": float(self.shares.sink_mass.iloc[0]), "dormant": float(self.shares.share["dormant"]),
            "active": float(self.shares.share["active"]),
        }  # fmt: skip
        shown = {"e4": replaced, "log_ratio": ratio, "dd": specific, "z_dormant": silence, "z_active": function,
                 "c1_dormant": dropped[0], "c4_dormant": quiet}  # fmt: skip
        for name, claim in shown.items():
            found = claim.interval
            numbers |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
        return numbers

    def _verdict(
        self, silence: _Claim, function: _Claim, n3: bool | None, bias: bool | None, n4: bool | None, ratio: _Claim,
        n5: bool | None, replaced: _Claim, margin: float,
    ) -> tuple[str, str]:  # fmt: skip
        between = self.between()
        if self.above("Z", "mixed", margin).holds and between > 0.5:
            return "graded", f"{between:.0%} of its work is done at tokens between dormant and active"
        if silence.holds is None:
            return "no sink", "too few dormant tokens to test"
        if not n3 and _surely_above(self, "C1", margin):
            if bias:
                return "constant bias", "dropping the sink costs; putting its mean there does not"
            if _surely_above(self, "C1m", margin):
                return "broadcast", "dropping the sink costs, and its mean does not replace it"
            return "undecided", "the sink's value is needed; whether a constant would do is open"
        if function.holds is None:
            return "always dormant", "too few active tokens to test"
        if not silence.holds:
            if n3 and self.above("Z", "dormant", margin).holds:
                return "graded", "it writes content where it is dormant"
            return "undecided", "whether it is silent where dormant is open"
        if not function.holds:
            if self.below("Z", "active", margin).holds:
                return "redundant", "silencing it where it is active costs nothing"
            return "undecided", "whether it is needed where active is open"
        if not n3:
            return "undecided", "whether the sink's value is needed is open"
        if not n4:
            if ratio.interval.high < FORCED:
                return "not forced", "renormalizing costs less than 3 times dropping"
            return "undecided", "whether a forced read-out hurts is open"
        if n5:
            fully = replaced.interval.high < FULLY
            return ("supports fully" if fully else "supports partly"), f"E4 upper bound {replaced.interval.high:.2f}"
        if replaced.interval.low > PARTLY:
            return "kernel", "no fitted ReLU does half of its work"
        return "undecided", "whether a ReLU does its work is open"


def _surely_above(evidence: _Evidence, intervention: str, margin: float) -> bool:
    return any(evidence.above(intervention, state, margin).holds for state in ("dormant", "active"))


def _all(*claims: _Claim) -> bool | None:
    """All claims that can be tested hold; None if none can."""
    held = [claim.holds for claim in claims if claim.holds is not None]
    return all(held) if held else None


def _p(distance: float, samples: np.ndarray, *, below: bool) -> float:
    """One-sided t-test over sequences that a number lies below (or above) zero by ``distance``."""
    error = samples.std(ddof=1) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan
    score = distance / max(error, 1e-12)
    return float(stats.t.cdf(score, len(samples) - 1) if below else stats.t.sf(score, len(samples) - 1))


def _mean(total: np.ndarray, count: np.ndarray, axis: int = -1) -> np.ndarray:
    return total.sum(axis) / count.sum(axis)


def _ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
    return (above.sum(axis) + _TINY) / (below.sum(axis) + _TINY)


def _log_ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.log(_ratio(above, below, axis))
