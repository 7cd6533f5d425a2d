"""Sink measures: from attention rows, or from the mass on a few keys, to numbers per head.

Rows are causal unless a visibility is given. Sources: sink rate, arXiv 2410.10781.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import InputError


@dataclass(frozen=True)
class SinkRule:
    """When a head counts as having a sink in a sequence: its mean mass on the sink exceeds ``eps``, strictly.

    Attributes:
        eps: Threshold on the mean mass, in (0, 1).
        skip_rows: How many first real tokens of each sequence are left out: early rows see few keys, so that even
            uniform attention puts much on each.
    """

    eps: float = 0.3
    skip_rows: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise InputError("a mass threshold lies between 0 and 1", expected="0 < eps < 1", got=self.eps)
        if self.skip_rows < 0:
            raise InputError("rows are skipped from the start", expected="skip_rows >= 0", got=self.skip_rows)

    @classmethod
    def gu(cls, eps: float = 0.3) -> SinkRule:
        """The published rule: ``alpha_k = 1/(T-k) sum_{i>=k} A[i,k]`` with every row counted (arXiv 2410.10781).

        At k = 0 that average holds query 0, which is always 1; compare at T = 64 only.
        """
        return cls(eps, 0)


def received_mass(
    weights: Float[Tensor, "*batch query key"], visible: Bool[Tensor, "*#batch query key"]
) -> Float[Tensor, "*batch key"]:
    """Mean weight of each key over the queries that see it; under causal rows this is Gu's ``alpha_k``, 0/0 := 0."""
    seen = visible.expand(weights.shape)
    return (weights * seen).sum(-2) / seen.sum(-2).clamp(min=1)


def locate_sink(
    weights: Float[Tensor, "*batch row key"], visible: Bool[Tensor, "*#batch row key"], *, min_share: float = 0.5
) -> tuple[Tensor, Tensor]:
    """The key that receives the most over the rows that see it.

    A key counts only if at least ``min_share`` of the rows see it: the last keys are seen by few rows, and an identity
    or previous-token head would make a sink of each.

    Returns:
        Key index and its mean received weight, both ``[*batch]``.
    """
    seen = visible.expand(weights.shape)
    enough = seen.sum(-2) >= min_share * seen.any(-1).sum(-1, keepdim=True)
    mass = received_mass(weights, seen).masked_fill(~enough, -1.0)
    best = mass.max(-1)
    return best.indices, best.values.clamp(min=0.0)


def margin(mass: Tensor) -> Tensor:
    """Dormancy score ``g = logit(s)`` of a sink mass s: minus the log-sum-exp of the scores relative to the sink."""
    return torch.logit(mass.float(), eps=1e-7)


def entropy(weights: Float[Tensor, "*row key"]) -> Float[Tensor, "*row"]:
    """Entropy of each row in nats, over the weights as they are."""
    return torch.special.entr(weights.float()).sum(-1)
