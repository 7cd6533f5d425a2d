"""States: how awake each head is at each token, and whether it sleeps there.

A head sleeps by parking its weight on the sink, wherever the sink is; a head whose rows need not sum to one (ReLU
attention) can sleep without a sink, by writing nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from sinklens.observe import Activity, record_activity
from sinklens.prompts import PromptSet
from sinklens.scanning import DORMANT_RATIO
from sinklens.vocabulary import Heads, SinkKeys

ASLEEP = 0.5
"""A head sleeps at a token if at least half of its weight lies on the sink."""
_STRONG = 0.3
_EPS = 1e-7


@dataclass(frozen=True, eq=False)
class States:
    """What every head does at every token.

    Attributes:
        heads: The heads, in row order.
        score: How awake, float32 ``[head, sequence, position]``: ``-logit(mass on the sink)``; for silent heads the
            log of the output's norm relative to reading one average token.
        asleep: Bool, same shape.
        counted: Which tokens take part, ``[sequence, position]``: real, past the first rows, and after the sink.
        silent: Heads whose sleep is read from what they write, since their rows do not sum to one.
        norm: Norm of the head's output after W_O, same shape as ``score``.
        mass: Weight on the sink, same shape.
        reference: Norm of reading one average content token, ``[head]``.
        blind: Heads in layers that do not see the sink at some counted tokens (sliding windows).
    """

    heads: Heads
    score: np.ndarray
    asleep: np.ndarray
    counted: np.ndarray
    silent: np.ndarray
    norm: np.ndarray
    mass: np.ndarray
    reference: np.ndarray
    blind: np.ndarray


def read_states(activity: Activity, skip_rows: int, *, asleep: float = ASLEEP) -> States:
    """Turn a recording into states.

    Args:
        activity: The recording.
        skip_rows: Rows at each sequence's start that are left out.
        asleep: Share of the weight on the sink from which a head counts as asleep.
    """
    # Rows before a sink in mid-sequence cannot park there.
    counted = activity.counted(skip_rows) & (activity.uniform > 0).any(0)
    silent = _unnormalized(activity, counted)
    reference = np.nanmean(activity.per_sequence["value_norm"], 1)
    blind = np.any(~(activity.uniform > 0) & counted, axis=(1, 2))[activity.layer_of_row]
    score, sleeps = score_of(activity.mass, activity.norm, silent, reference, asleep)
    return States(activity.heads, score, sleeps, counted, silent, activity.norm, activity.mass, reference, blind)


def _unnormalized(activity: Activity, counted: np.ndarray) -> np.ndarray:
    """Heads whose rows do not sum to one, a learned sink's share included (it counts as mass on the sink)."""
    error = np.nan_to_num(activity.per_sequence["row_sum_error"]).max(1)
    # A product of matrices, so that a recording on disk is read and not copied.
    mass = activity.mass.reshape(len(error), -1) @ counted.ravel().astype(np.float32) / max(counted.sum(), 1)
    return (error > 0.1) & (np.nan_to_num(activity.per_sequence["row_sum"], nan=1.0).mean(1) + mass < 0.9)


def score_of(mass: np.ndarray, norm: np.ndarray, silent: np.ndarray, reference: np.ndarray,
             asleep: float = ASLEEP) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Score and sleep of every head from mass and norm, both ``[head, ...]``."""
    clipped: np.ndarray = np.clip(np.asarray(mass), _EPS, 1 - _EPS)
    score = np.log1p(-clipped)
    score -= np.log(clipped, out=clipped)
    sleeps: np.ndarray = np.asarray(mass >= asleep)
    written = norm[silent] / reference[silent].reshape(-1, *(1,) * (norm.ndim - 1))
    score[silent], sleeps[silent] = np.log(np.maximum(written, _EPS)), written <= DORMANT_RATIO
    return score.astype(np.float32, copy=False), sleeps


# ---- recording where the sink is not known --------------------------------------------------------------------------


def record_located(model: object, prompts: PromptSet, *, batch_size: int = 2, skip_rows: int = 8,
                   progress: bool = True) -> Activity:  # fmt: skip
    """Record with the sink wherever the heads park: one pass, and a second over sequences with a sink elsewhere.

    The recording's ``sink_keys`` then hold one position for each sequence.
    """

    def record(some: PromptSet, keys: SinkKeys) -> Activity:
        return record_activity(model, some, sink_keys=keys, batch_size=batch_size, skip_rows=skip_rows,
                               progress=progress)  # fmt: skip

    made = record(prompts, SinkKeys())
    sink_at = torch.tensor(find_sinks(made))
    moved = sink_at.nonzero().flatten()
    if not len(moved):
        return made
    keys = SinkKeys(positions=sink_at[:, None])
    again = record(prompts.select(moved), keys.select(moved))
    for name in ("mass", "norm", "uniform"):
        getattr(made, name)[:, moved] = getattr(again, name)
    for name, values in made.per_sequence.items():
        values[:, moved] = again.per_sequence[name]
    return replace(made, sink_keys=keys)


def find_sinks(activity: Activity) -> np.ndarray:
    """Where the heads park, one position a sequence, from its first token: the key that most heads agree on.

    Every head that puts more than .3 on its located key votes with that mass; without any vote it is the first token.
    """
    place, mass = (activity.per_sequence[name] for name in ("located_position", "located_mass"))
    votes = np.where(np.nan_to_num(mass) > _STRONG, mass, 0.0)
    columns = zip(np.nan_to_num(place).astype(int).T, votes.T, strict=True)
    return np.array([int(np.bincount(spots, weights).argmax()) for spots, weights in columns])
