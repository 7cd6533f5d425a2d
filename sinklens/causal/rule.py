"""The rule: what a head's effects, taken together, say about normalization as the reason for its sink.

A head *supports* the hypothesis if all five hold, measured at dormant tokens by changing the head there only, and at
active tokens by changing it there only (``m``: the margin, 5 % of the cost of mean-ablation, at least .001 nats):

- **N1 silence**: silencing it at its dormant tokens costs less than m.
- **N2 function**: silencing it at its active tokens costs more than m.
- **N3 value**: dropping the sink costs less than m in both states.
- **N4 forced read-out**: on dormant tokens dropping and renormalizing costs more than 3 times dropping, and by
  more than the same pair costs on the heaviest content key.
- **N5 function without normalization**: the fitted ReLU without a sink costs less than m on dormant tokens, and on
  active tokens less than .2 (*fully*) or .5 (*partly*) of silencing.

A head that does most of its work at tokens between the two states is *graded*, whatever else holds. Where N3 fails, the
sink is a *constant bias* if its mean contribution costs, in its place and in each state, less than m or less than .2 of
dropping it; it is a *broadcast* if in some state the mean surely does neither.
Effects "less than" are equivalence tests (one-sided, 95 %). Support over many heads is Holm-adjusted: the p-value of a
head is the largest of its five, since all must hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from sinklens.causal.interventions import Intervention, interventions
from sinklens.measures import Interval, paired_interval

MARGIN_SHARE, MARGIN_NATS = 0.05, 1e-3
FORCED = math.log(3)
FULLY, PARTLY = 0.2, 0.5
ALPHA = 0.05
FEWEST = 30
"""A state with fewer tokens than this is not tested by itself."""

FIRST = {"dormant": interventions("Z,C1"), "active": interventions("Z,C1,Mn"), "mixed": interventions("Z")}
"""The first look at a head, done at the tokens of one state only: it settles most heads. See ``second_look``."""

_TINY = 1e-7


@dataclass(frozen=True)
class Claim:
    """A one-sided claim about a number: its interval, whether it holds, and its p-value."""

    interval: Interval
    holds: bool | None
    p: float


UNTESTED = Claim(Interval(math.nan, math.nan, math.nan), None, math.nan)


class Evidence:
    """The sums of one head, and the claims that rest on them.

    Args:
        totals: Sums by unit, intervention, place, state and sequence; see :class:`sinklens.causal.Contrast`.
        shares: Share of the tokens in each state, by unit.
        fits: What was fitted; see :class:`sinklens.causal.Contrast`.
        unit: Which unit.
        resamples: Bootstrap size.
        seed: Seed of the resampling.
    """

    def __init__(
        self, totals: pd.DataFrame, shares: pd.DataFrame, fits: pd.DataFrame, unit: str, resamples: int, seed: int
    ) -> None:
        mine = totals[totals["heads"] == unit]
        self.groups = {
            key: group.sort_values("sequence") for key, group in mine.groupby(["intervention", "at", "tokens"])
        }
        self.shares = shares[shares["heads"] == unit].set_index("tokens")
        self.resamples, self.seed = resamples, seed
        self.power = self._power(fits)

    def _power(self, fits: pd.DataFrame) -> int:
        """Plain or squared ReLU, whichever fitted the calibration tokens better: never chosen on the test."""
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

    @cached_property
    def margin(self) -> float:
        """5 % of what mean-ablation costs where the head is active, at least .001 nats."""
        cost = self.mean("Mn", "active")
        return max(MARGIN_NATS, 0.0 if math.isnan(cost) else MARGIN_SHARE * cost)

    def below(self, intervention: str, state: str, margin: float) -> Claim:
        """The effect is smaller than the margin (one-sided equivalence)."""
        return self._against(intervention, state, margin, below=True)

    def above(self, intervention: str, state: str, margin: float) -> Claim:
        """The effect is larger than the margin."""
        return self._against(intervention, state, margin, below=False)

    def _against(self, intervention: str, state: str, margin: float, *, below: bool) -> Claim:
        sums = self.kl(intervention, state)
        if sums is None:
            return UNTESTED
        interval = self.interval(_mean, *sums, confidence=1 - 2 * ALPHA)
        holds = interval.high < margin if below else interval.low > margin
        # On a log scale: KL is positive and skewed.
        value = np.log((sums[0] / sums[1]).clip(_TINY))
        return Claim(
            interval, holds, _p(math.log(max(interval.estimate, _TINY)) - math.log(margin), value, below=below)
        )

    @cached_property
    def forced(self) -> tuple[Claim, Claim]:
        """Log ratio of C2 to C1 above log 3, and D1 above the same difference for the heaviest content key."""
        parts = [self.kl(name, "dormant") for name in ("C2", "C1", "R2", "R1")]
        if any(part is None for part in parts):
            return UNTESTED, UNTESTED
        (c2, count), (c1, _), (r2, _), (r1, _) = (part for part in parts if part is not None)
        ratio = self.interval(_log_ratio, c2, c1)
        difference = self.interval(_mean, (c2 - c1) - (r2 - r1), count)
        logs = np.log((c2 / count + _TINY) / (c1 / count + _TINY))
        each = ((c2 - c1) - (r2 - r1)) / count
        return (
            Claim(ratio, ratio.low > FORCED, _p(ratio.estimate - FORCED, logs, below=False)),
            Claim(difference, difference.low > 0, _p(difference.estimate, each, below=False)),
        )

    def matched(self) -> float:
        """The same difference for random keys of the sink's weight, changed everywhere; NaN where that was not run."""
        groups = [self.groups.get((name, "everywhere", "dormant")) for name in ("C2", "C1", "R2m", "R1m")]
        costs = [math.nan if g is None or not g["count"].sum() else g.kl.sum() / g["count"].sum() for g in groups]
        return float((costs[0] - costs[1]) - (costs[2] - costs[3]))

    @cached_property
    def replaced(self) -> Claim:
        """E4: what the fitted ReLU costs on active tokens, in units of silencing; ``holds`` is its upper end < .5."""
        fitted, silent = self.kl(self.fitted, "active"), self.kl("Z", "active")
        if fitted is None or silent is None:
            return UNTESTED
        ratio = self.interval(_ratio, fitted[0], silent[0])
        logs = np.log((fitted[0] + _TINY) / (silent[0] + _TINY))
        return Claim(ratio, ratio.high < PARTLY, _p(math.log(max(ratio.estimate, _TINY) / PARTLY), logs, below=True))

    def between(self) -> float:
        """Share of the head's work (KL of silencing, summed) that it does at tokens between dormant and active."""
        sums = [self.kl("Z", state) for state in ("dormant", "active", "mixed")]
        work = [0.0 if part is None else float(part[0].sum()) for part in sums]
        return work[2] / sum(work) if sum(work) > 0 else math.nan

    @property
    def fitted(self) -> str:
        return "C4f" if self.power == 1 else "C4f2"

    @cached_property
    def silence(self) -> Claim:
        """N1."""
        return self.below("Z", "dormant", self.margin)

    @cached_property
    def function(self) -> Claim:
        """N2."""
        return self.above("Z", "active", self.margin)

    @cached_property
    def dropped(self) -> tuple[Claim, Claim]:
        """N3, on dormant and on active tokens."""
        return self.below("C1", "dormant", self.margin), self.below("C1", "active", self.margin)

    def constant(self, state: str) -> bool | None:
        """Whether the sink's mean does in its place: True, False, or None where it is open or untested.

        It costs less than m, or, where dropping surely costs more, less than ``FULLY`` of dropping.
        """
        put, dropped = self.kl("C1m", state), self.kl("C1", state)
        if put is None or dropped is None or self.below("C1m", state, self.margin).holds:
            return None if put is None else True
        surely = self.above("C1m", state, self.margin).holds
        if not self.above("C1", state, self.margin).holds:
            return False if surely else None
        share = self.interval(_ratio, put[0], dropped[0])
        return True if share.high < FULLY else False if surely and share.low > FULLY else None

    @cached_property
    def quiet(self) -> Claim:
        """First half of N5: the fitted ReLU is silent where the head is dormant."""
        return self.below(self.fitted, "dormant", self.margin)

    def settled(self) -> tuple[str, str] | None:
        """The verdict and its reason where the first look decides; None where the second is needed."""
        between = self.between()
        if self.above("Z", "mixed", self.margin).holds and between > 0.5:
            return "graded", f"{between:.0%} of its work is done at tokens between dormant and active"
        if self.silence.holds is None:
            return "never dormant", "too few dormant tokens to test"
        valueless = every(*self.dropped)
        if not valueless and any(self.above("C1", state, self.margin).holds for state in ("dormant", "active")):
            return None
        if self.function.holds is None:
            return "always dormant", "too few active tokens to test"
        if not self.silence.holds:
            if valueless and self.above("Z", "dormant", self.margin).holds:
                return "graded", "it writes content where it is dormant"
            return "undecided", "whether it is silent where dormant is open"
        if not self.function.holds:
            if self.below("Z", "active", self.margin).holds:
                return "redundant", "silencing it where it is active costs nothing"
            return "undecided", "whether it is needed where active is open"
        return None if valueless else ("undecided", "whether the sink's value is needed is open")

    def second_look(self) -> dict[str, tuple[Intervention, ...]]:
        """What is still to be done at the tokens of each state before the head can be judged."""
        if self.settled():
            return {}
        if not every(*self.dropped):
            return {"dormant": interventions("C1m"), "active": interventions("C1m")}
        return {"dormant": interventions(f"C2,R1,R2,{self.fitted}"), "active": interventions(self.fitted)}

    def verdict(self) -> tuple[str, str]:
        """The verdict and its reason."""
        if first := self.settled():
            return first
        if not every(*self.dropped):
            states = [state for state in ("dormant", "active") if self.kl("C1m", state) is not None]
            does = [self.constant(state) for state in states]
            if does and all(does):
                return (
                    "constant bias",
                    "dropping the sink costs; its mean in its place takes that back",
                )
            if False in does:
                return "broadcast", "dropping the sink costs, and its mean does not replace it"
            return "undecided", "the sink's value is needed; whether a constant would do is open"
        ratio, specific = self.forced
        if not every(ratio, specific):
            if ratio.interval.high < FORCED:
                return "not forced", "renormalizing costs less than 3 times dropping"
            return "undecided", "whether a forced read-out hurts is open"
        bounds = self.replaced.interval
        if every(self.quiet, self.replaced):
            return ("supports fully" if bounds.high < FULLY else "supports partly"), f"E4 upper bound {bounds.high:.2f}"
        if bounds.low > PARTLY:
            return "kernel", "no fitted ReLU does half of its work"
        return "undecided", "whether a ReLU does its work is open"

    def row(self) -> dict[str, Any]:
        """Everything about the head, as a row of the table of verdicts."""
        verdict, reason = self.verdict()
        ratio, specific = self.forced
        needed = (self.silence, self.function, *self.dropped)
        claims = [*needed, *(c for c in (ratio, specific, self.quiet, self.replaced) if c.holds is not None)]
        # All must hold, so the largest p counts; one that the first look settled can only have a larger one.
        p = math.nan if any(claim.holds is None for claim in needed) else max(claim.p for claim in claims)
        numbers: dict[str, Any] = {
            "verdict": verdict, "reason": reason, "n1": self.silence.holds, "n2": self.function.holds,
            "n3": every(*self.dropped), "n4": every(ratio, specific), "n5": every(self.quiet, self.replaced),
            "margin": self.margin, "between": self.between(), "dd_matched": self.matched(),
            "c1m_dormant": self.mean("C1m", "dormant"), "c1m_active": self.mean("C1m", "active"),
            "c1_active": self.dropped[1].interval.estimate, "power": self.power, "p": p,
            "sink_mass": float(self.shares.sink_mass.iloc[0]), "dormant": float(self.shares.share["dormant"]),
            "active": float(self.shares.share["active"]),
        }  # fmt: skip
        shown = {"e4": self.replaced, "log_ratio": ratio, "dd": specific, "z_dormant": self.silence,
                 "z_active": self.function, "c1_dormant": self.dropped[0], "c4_dormant": self.quiet}  # fmt: skip
        for name, claim in shown.items():
            found = claim.interval
            numbers |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
        return numbers


def every(*claims: Claim) -> bool | None:
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
