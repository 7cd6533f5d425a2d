"""What a trigger study is made of: its protocol, its data in two halves, and its cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sinklens.observe import Activity
from sinklens.prompts import PromptSet
from sinklens.triggers.features import Feature, TokenTable
from sinklens.triggers.states import States
from sinklens.vocabulary import Head

Direction = Literal["wakes", "parks"]
DIRECTIONS: dict[int, Direction] = {1: "wakes", -1: "parks"}


@dataclass(frozen=True)
class Protocol:
    """What is fixed before looking.

    Attributes:
        asleep: Weight on the sink from which a head counts as asleep, 0..1.
        usual: Range of the share of tokens outside the state to be explained (asleep for wakes, awake for parks).
        bic_gain: Evidence for two modes of the score.
        sequences: Sequences that must hold each state, in each half.
        feature_sequences: Sequences of each half in which a feature must occur.
        q: Level of every family of tests.
        effect: A set is confirmed if the lower bound of its risk difference exceeds this.
        draws: Draws of the null.
        min_shift: Smallest rotation of the null, tokens.
        skip_rows: Tokens at each sequence's start that are left out.
        max_size: Largest trigger set.
        checks: How many of the best explained cases the counterfactual check takes up.
        resamples: Bootstrap size.
        seed: Seed of everything random.
    """

    asleep: float = 0.5
    usual: tuple[float, float] = (0.2, 0.995)
    bic_gain: float = 10.0
    sequences: int = 30
    feature_sequences: int = 20
    q: float = 0.05
    effect: float = 0.15
    draws: int = 2000
    min_shift: int = 8
    skip_rows: int = 8
    max_size: int = 8
    checks: int = 40
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Case:
    """One head and direction with its trigger set.

    Attributes:
        head: The head.
        row: Its row in the states.
        sign: +1 if triggers wake it, -1 if they make it park.
        members: The features of its set.
        union: Where any of them holds, bool ``[sequence, position]``, over all sequences.
    """

    head: Head
    row: int
    sign: int
    members: tuple[Feature, ...]
    union: np.ndarray

    @property
    def key(self) -> dict[str, Any]:
        """The columns that identify it."""
        return {"layer": self.head.layer, "head": self.head.head, "direction": DIRECTIONS[self.sign]}


@dataclass(frozen=True, eq=False)
class Study:
    """Everything the steps share.

    Attributes:
        prompts: All sequences.
        activity: Their recording.
        states: Score and sleep of every head.
        table: The tokens.
        disc: Sequences in which triggers are named.
        conf: Sequences in which they are confirmed.
        protocol: What was fixed before.
    """

    prompts: PromptSet
    activity: Activity
    states: States
    table: TokenTable
    disc: np.ndarray
    conf: np.ndarray
    protocol: Protocol

    def rng(self, purpose: int) -> np.random.Generator:
        """An independent source for each purpose, the same for the same seed."""
        return np.random.default_rng([self.protocol.seed, purpose])

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return all(site.kind == "causal" for site in self.activity.sites)

    def state(self, rows: np.ndarray, signs: np.ndarray, half: np.ndarray) -> np.ndarray:
        """The state that each case's triggers bring about, bool ``[case, sequence of the half, position]``."""
        awake = ~self.states.asleep[np.ix_(rows, half)]
        return (awake == (signs > 0)[:, None, None]) & self.states.counted[half]

    def hits(self, case: Case, feature: Feature) -> np.ndarray:
        """How often each token stands where a feature looks and the state follows, on DISC, ``[token]``."""
        state = self.state(np.array([case.row]), np.array([case.sign]), self.disc)[0]
        sequences, places = np.nonzero(feature.track(self.table)[self.disc] & state)
        codes = self.table.codes[self.disc][sequences, places - feature.offset]
        return np.bincount(codes, minlength=len(self.table.texts))


def split(prompts: PromptSet) -> tuple[np.ndarray, np.ndarray]:
    """DISC and CONF: alternating sequences, within each domain."""
    order = np.argsort(np.array(prompts.domains), kind="stable")
    return np.sort(order[::2]), np.sort(order[1::2])
