"""Interventions: what is done to a head, and which explanation each one isolates.

With ``o = s v_sink + (1 - s) r`` (s: sink mass, r: renormalized content read-out) an intervention replaces the output
of a head. Each is a small value that turns a head's calibration into a normalizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sinklens.normalizers import (
    Constant,
    DropHeaviest,
    DropSink,
    MeanSink,
    Normalizer,
    ReLU,
    RenormalizeWithoutSink,
    Softmax,
)


@dataclass(frozen=True, eq=False)
class HeadMeans:
    """A head's means over calibration tokens.

    Attributes:
        sink: Mean of the sink's contribution ``s v_sink``, ``[d_value]``.
        output: Mean of the head's output, ``[d_value]``.
    """

    sink: Tensor
    output: Tensor


@dataclass(frozen=True)
class Intervention:
    """One way to change a head.

    Attributes:
        id: Short name used in tables.
        words: What is done.
        isolates: Which explanation it speaks to.
        normalizer: Makes the head's normalizer from its calibration.
    """

    id: str
    words: str
    isolates: str
    normalizer: Callable[[HeadMeans], Normalizer]


C0 = Intervention("C0", "nothing changed", "check: every effect is 0", lambda means: Softmax())
C1 = Intervention("C1", "drop the sink", "is the sink's value needed?", lambda means: DropSink())
C1M = Intervention("C1m", "sink -> its mean", "constant-bias part", lambda means: MeanSink(means.sink))
C2 = Intervention(
    "C2", "drop the sink, renormalize", "does a sum of one force a harmful read-out?",
    lambda means: RenormalizeWithoutSink(),
)  # fmt: skip
C4_RAW = Intervention(
    "C4raw", "ReLU on raw scores, sink dropped", "a head without normalization or sink, unfitted",
    lambda means: DropSink(ReLU(scale="visible")),
)  # fmt: skip
C4_SINK = Intervention(
    "C4", "ReLU on scores relative to the sink, sink dropped", "a head without normalization or sink, unfitted",
    lambda means: DropSink(ReLU(scale="visible", gauge="sink")),
)  # fmt: skip
R1 = Intervention("R1", "drop the heaviest content key", "specificity to the sink", lambda means: DropHeaviest())
R2 = Intervention(
    "R2", "drop the heaviest content key, renormalize", "specificity to the sink",
    lambda means: DropHeaviest(renormalize=True),
)  # fmt: skip
ZERO = Intervention("Z", "silence the head", "scale: does the head matter here at all?", lambda means: Constant())
MEAN = Intervention("Mn", "head -> its mean output", "scale", lambda means: Constant(means.output))

CORE = (C0, C1, C1M, C2, C4_RAW, C4_SINK, R1, R2, ZERO, MEAN)
"""The first form of the contrast."""
