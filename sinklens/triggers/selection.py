"""The trigger set: per head, the smallest set of features that explains when it leaves its usual state.

Existence is cheap: most heads have some feature that matters. What counts is how fully a small named set explains the
state. Features join one by one, each by the F1 it adds on the discovery sequences, and only while that gain holds
across sequences: "newline" and "after a newline" are then not both claimed. F1 alone would choose broad features that
hold almost everywhere, so a feature must also *trigger*: the tokens it adds must be in the state often enough to close
half of the gap between the head's usual share and certainty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

GAIN, STEADY, GAP = 0.01, 2.0, 0.5
"""A feature joins if it adds at least .01 to F1, and at least 2 standard errors (jackknife over sequences); and if the
share of its new tokens in the state is at least ``usual + GAP (1 - usual)``."""


@dataclass(frozen=True, eq=False)
class TriggerSets:
    """Chosen features by head, in the order in which they joined.

    Attributes:
        members: Feature numbers of each head.
        union: Where any chosen feature holds, bool ``[head, sequence, position]``.
    """

    members: tuple[tuple[int, ...], ...]
    union: np.ndarray


def choose_sets(
    state: np.ndarray,
    tracks: np.ndarray,
    counted: np.ndarray,
    allowed: np.ndarray,
    *,
    max_size: int = 8,
    tick: Callable[[], object] = lambda: None,
) -> TriggerSets:
    """Choose a trigger set for every head at once, greedily by F1.

    With U the union so far, feature f would give ``F1 = 2 |S & (U or f)| / (|S| + |U or f|)`` for the state S. One
    batched product counts, for all heads and features, what each feature would add to both.

    Args:
        state: Bool ``[head, sequence, position]``: the state to explain.
        tracks: Bool ``[feature, sequence, position]``.
        counted: Bool ``[sequence, position]``.
        allowed: Bool ``[head, feature]``: candidates of each head.
        max_size: Largest set.
        tick: Called once a round.
    """
    heads = len(state)
    state = state & counted
    track = np.ascontiguousarray((tracks & counted).transpose(1, 0, 2), dtype=np.float32)
    members: list[list[int]] = [[] for _ in range(heads)]
    union = np.zeros_like(state)
    usual = state.sum((1, 2)) / counted.sum()
    floor = usual + GAP * (1 - usual)
    open_heads = np.flatnonzero(allowed.any(1))
    for _ in range(max_size):
        if not len(open_heads):
            break
        best, gain, error = _best_addition(
            state[open_heads], union[open_heads], track, allowed[open_heads], floor[open_heads]
        )
        keeps = (gain >= GAIN) & (gain >= STEADY * error)
        for head, feature in zip(open_heads[keeps], best[keeps], strict=True):
            members[head].append(int(feature))
            union[head] |= tracks[feature]
        open_heads = open_heads[keeps]
        tick()
    return TriggerSets(tuple(map(tuple, members)), union & counted)


def _best_addition(state: np.ndarray, union: np.ndarray, track: np.ndarray, allowed: np.ndarray,
                   floor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """The feature that adds most to each head's F1, its gain, and the gain's standard error over sequences."""
    uncovered = ~union
    # [sequence, feature, head]
    new_hits = track @ (state & uncovered).transpose(1, 2, 0).astype(np.float32)
    new_all = track @ uncovered.transpose(1, 2, 0).astype(np.float32)
    hits, marked, total = ((part.sum(-1)).T for part in (state & union, union, state))
    f1 = _f1((hits[:, None] + new_hits).sum(0), (marked[:, None] + new_all).sum(0), total.sum(0))
    pure = new_hits.sum(0) >= floor * np.maximum(new_all.sum(0), 1)
    best = np.where(allowed.T & pure, f1, -1.0).argmax(0)
    rows = np.arange(len(best))
    now = hits, marked
    then = hits + new_hits[:, best, rows], marked + new_all[:, best, rows]

    def value(parts: tuple[np.ndarray, np.ndarray], without: bool) -> np.ndarray:
        sums = [part.sum(0) - part if without else part.sum(0) for part in (*parts, total)]
        return _f1(*sums)

    gain = np.where((allowed.T & pure).any(0), value(then, False) - value(now, False), -1.0)
    left_out = value(then, True) - value(now, True)
    n = len(left_out)
    error = np.sqrt((n - 1) / n * ((left_out - left_out.mean(0)) ** 2).sum(0))
    return best, gain, error


def _f1(hits: np.ndarray, marked: np.ndarray, total: np.ndarray) -> np.ndarray:
    return 2 * hits / np.maximum(marked + total, 1)


def union_of(members: tuple[tuple[int, ...], ...], tracks: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Where any of a head's features holds, bool ``[head, sequence, position]``."""
    union = np.zeros((len(members), *counted.shape), dtype=bool)
    for head, chosen in enumerate(members):
        for feature in chosen:
            union[head] |= tracks[feature]
    return union & counted


# ---- baselines ------------------------------------------------------------------------------------------------------


def shifted_states(state: np.ndarray, counted: np.ndarray, min_shift: int, rng: np.random.Generator) -> np.ndarray:
    """The states rotated within each sequence's counted stretch, the same shift for all heads: shuffled labels."""
    moved = np.zeros_like(state)
    for row, here in enumerate(counted):
        n = int(here.sum())
        shift = int(rng.integers(min_shift, n - min_shift, endpoint=True)) if n > 2 * min_shift else 0
        moved[:, row, here] = np.roll(state[:, row, here], shift, axis=-1)
    return moved


def random_token_sets(
    union: np.ndarray, codes: np.ndarray, counted: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Random sets of distinct tokens that mark about as many tokens as each head's union.

    Shape ``[head, sequence, position]``. The baseline of token frequency: what an equally common set without any
    choice would score.
    """
    counts = np.bincount(codes[counted], minlength=codes.max() + 2)
    made = np.zeros_like(union)
    for head, wanted in enumerate(union.sum((1, 2))):
        order = rng.permutation(np.flatnonzero(counts))
        # Tokens more frequent than the whole set could not be part of it.
        order = order[counts[order] <= max(wanted, 1)]
        cut = int(np.searchsorted(counts[order].cumsum(), wanted, side="right"))
        member = np.zeros(len(counts), dtype=bool)
        member[order[:cut]] = wanted > 0
        made[head] = member[codes]
    return made & counted
