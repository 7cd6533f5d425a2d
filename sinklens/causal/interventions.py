"""Interventions: what is done to a head, and which explanation each one isolates.

With ``o = s v_sink + (1 - s) r`` (s: sink mass, r: renormalized content read-out) an intervention replaces the output
of a head. Each is a small value that turns a head's calibration into a normalizer; a few also alter the output itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from sinklens.causal.calibration import HeadCalibration
from sinklens.errors import InputError
from sinklens.normalizers import (
    Constant,
    DropHeaviest,
    DropMatched,
    DropSink,
    Entmax15,
    HideSink,
    LearnedSink,
    MeanSink,
    Mix,
    Normalizer,
    ReLU,
    RenormalizeWithoutSink,
    Sigmoid,
    Softmax,
    Sparsemax,
    SumToOne,
)

Alter: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From clean output, changed output ``[sequence, head, query, d_value]`` and the sink mass ``[sequence, head, query]``
to the output that is put in place; rows without a partner keep their clean output."""


@dataclass(frozen=True)
class Intervention:
    """One way to change a head.

    Attributes:
        id: Short name used in tables.
        words: What is done.
        isolates: Which explanation it speaks to.
        normalizer: Makes the head's normalizer from its calibration.
        alter: What is done to the output afterwards, if anything.
        fitted: Whether it needs the fitted part of the calibration.
    """

    id: str
    words: str
    isolates: str
    normalizer: Callable[[HeadCalibration], Normalizer]
    alter: Alter | None = None
    fitted: bool = False

    def dose(self, alpha: float) -> Intervention:
        """The same at a dose in [0, 1]: ``(1 - alpha) clean + alpha changed``, as weights.

        Raises:
            InputError: A dose outside [0, 1], or an intervention that alters outputs.
        """
        if not 0 <= alpha <= 1:
            raise InputError("a dose lies between nothing and all", expected="0 <= alpha <= 1", got=alpha)
        if self.alter is not None:
            raise InputError("doses are mixtures of weights", expected="an intervention on weights", got=self.id)
        return Intervention(
            f"{self.id}@{alpha:g}", f"{self.words}, dose {alpha:g}", self.isolates,
            lambda c: Mix(self.normalizer(c), alpha), fitted=self.fitted,
        )  # fmt: skip


def _same(normalizer: Normalizer) -> Callable[[HeadCalibration], Normalizer]:
    """The same normalizer for every head: heads that share one run together."""
    return lambda calibration: normalizer


def _relu(calibration: HeadCalibration, power: int) -> ReLU:
    return calibration.relu[power].normalizer


def _random_direction(clean: Tensor, changed: Tensor, mass: Tensor) -> Tensor:
    # The seed is fixed: the same tensor shape always meets the same direction, whatever else the batch holds.
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(clean.shape[1:], generator=generator).to(clean)
    size = (changed - clean).float().norm(dim=-1, keepdim=True).to(clean)
    return clean + size * noise / noise.norm(dim=-1, keepdim=True)


def _other_sequence(clean: Tensor, changed: Tensor, mass: Tensor) -> Tensor:
    change = changed - clean
    # A sequence alone in its batch takes the perturbation of a token half a length away.
    return clean + (change.roll(1, 0) if len(change) > 1 else change.roll(change.shape[2] // 2, 2))


def _active_size(clean: Tensor, changed: Tensor, mass: Tensor) -> Tensor:
    norm, awake = clean.float().norm(dim=-1), (mass <= 0.5).float()
    size = ((norm * awake).sum((0, 2)) / awake.sum((0, 2)).clamp(min=1))[:, None, None]
    target = torch.where(size > 0, size, norm.mean((0, 2))[:, None, None])
    return changed * (target / changed.float().norm(dim=-1, keepdim=True).clamp(min=1e-9)).to(changed)


_ALL = (
    Intervention("C0", "nothing changed", "check: every effect is 0", _same(Softmax())),
    Intervention("C1", "drop the sink", "is the sink's value needed?", _same(DropSink())),
    Intervention("C1m", "sink -> its mean", "constant-bias part", lambda c: MeanSink(c.sink)),
    Intervention("C2", "drop the sink, renormalize", "does a sum of one force a harmful read-out?",
                 _same(RenormalizeWithoutSink())),
    Intervention("C2n", "random direction of C2's size", "is C2's harm its size?", _same(RenormalizeWithoutSink()),
                 _random_direction),
    Intervention("C2s", "C2's change from another sequence", "is C2's harm off the manifold?",
                 _same(RenormalizeWithoutSink()), _other_sequence),
    Intervention("C2c", "C2 scaled to the size of an awake output", "is C2's harm the factor 1/(1-s)?",
                 _same(RenormalizeWithoutSink()), _active_size),
    Intervention("C4raw", "ReLU on raw scores, sink dropped", "a head without normalization or sink, unfitted",
                 _same(DropSink(ReLU(scale="visible")))),
    Intervention("C4", "ReLU on scores relative to the sink, sink dropped",
                 "a head without normalization or sink, unfitted",
                 _same(DropSink(ReLU(scale="visible", gauge="sink")))),
    Intervention("C4f", "fitted ReLU, sink dropped", "a head without normalization or sink, 3 scalars",
                 lambda c: DropSink(_relu(c, 1)), fitted=True),
    Intervention("C4f2", "fitted squared ReLU, sink dropped", "a head without normalization or sink, 3 scalars",
                 lambda c: DropSink(_relu(c, 2)), fitted=True),
    Intervention("C4N", "the fitted ReLU, normalized over content", "kernel x normalization",
                 lambda c: RenormalizeWithoutSink(_relu(c, 1)), fitted=True),
    Intervention("C4S", "the fitted ReLU with the sink in, normalized", "kernel x normalization x sink",
                 lambda c: SumToOne(_relu(c, 1)), fitted=True),
    Intervention("C5", "sink -> a constant logit without value", "where the gate lives: the sink's mean score",
                 lambda c: HideSink(LearnedSink(c.sink_logit))),
    Intervention("C5f", "sink -> a fitted constant logit without value", "where the gate lives",
                 lambda c: HideSink(LearnedSink(c.exit_logit if c.exit_logit is not None else c.sink_logit)),
                 fitted=True),
    Intervention("C6g", "sigmoid, sink dropped", "operator control", _same(DropSink(Sigmoid()))),
    Intervention("C6s", "sparsemax", "operator control: hard zeros that sum to one", _same(Sparsemax())),
    Intervention("C6e", "1.5-entmax", "operator control: hard zeros that sum to one", _same(Entmax15())),
    Intervention("R1", "drop the heaviest content key", "specificity to the sink", _same(DropHeaviest())),
    Intervention("R2", "drop the heaviest content key, renormalize", "specificity to the sink",
                 _same(DropHeaviest(renormalize=True))),
    Intervention("R1m", "drop random content keys of the sink's weight", "specificity to the sink",
                 _same(DropMatched())),
    Intervention("R2m", "the same, renormalized", "specificity to the sink", _same(DropMatched(renormalize=True))),
    Intervention("Z", "silence the head", "scale: does the head matter here at all?", _same(Constant())),
    Intervention("Mn", "head -> its mean output", "scale", lambda c: Constant(c.output)),
)  # fmt: skip

INTERVENTIONS = {intervention.id: intervention for intervention in _ALL}
"""Every intervention by its id."""


def interventions(ids: Iterable[str | Intervention] | str) -> tuple[Intervention, ...]:
    """Look interventions up by id; a string is split at commas, and interventions pass through.

    Raises:
        InputError: An unknown id; lists those that exist.
    """
    asked = ids.split(",") if isinstance(ids, str) else list(ids)
    unknown = [name for name in asked if isinstance(name, str) and name.strip() not in INTERVENTIONS]
    if unknown:
        raise InputError("unknown intervention", expected=", ".join(INTERVENTIONS), got=", ".join(map(str, unknown)))
    return tuple(INTERVENTIONS[name.strip()] if isinstance(name, str) else name for name in asked)


CORE = interventions("C0,C1,C1m,C2,C4raw,C4,R1,R2,Z,Mn")
"""The first form: needs means only."""

SIX = interventions("C0,C1,C1m,C2,C4f,R2,Z")
"""The core six, for every head of a model."""

FULL = _ALL
"""Everything."""
