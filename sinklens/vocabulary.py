"""The words of sinklens: axes, heads, and which keys count as the sink.

Axes, the same words in code, einops patterns, docs and column names:

- ``batch``: a sequence of the current forward pass;
- ``head``: a query head (public indices are always query heads);
- ``query``: the position that attends;
- ``key``: the position attended to; the model's learned sink logit, where it has one, is a last, *virtual* key;
- ``layer``: the index of the attention site in the order in which the model calls them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sinklens.errors import HeadRangeError, InputError

Kind: TypeAlias = Literal["causal", "bidirectional", "cross"]
"""What an attention site may see: earlier positions, all positions, or another sequence."""

_HEAD = re.compile(r"\s*L?(\d+)\s*(?:[H.:]|\s)\s*H?(\d+)\s*", re.IGNORECASE)


class Head(NamedTuple):
    """One query head, written ``L18H8``: layer 18, head 8, both counted from 0."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Read ``L18H8`` or ``18.8``.

        Raises:
            InputError: The text names no head.
        """
        match = _HEAD.fullmatch(text)
        if match is None:
            raise InputError("a head is written as layer and head", expected="a form like L18H8", got=repr(text))
        return cls(int(match[1]), int(match[2]))


HeadLike: TypeAlias = "Head | tuple[int, int] | str"
HeadsLike: TypeAlias = "Heads | Iterable[HeadLike] | str"


class Heads(tuple[Head, ...]):
    """An ordered set of heads that can be passed from a table to a patch.

    Example:
        >>> Heads.of("L18H8, L20H8")
        Heads(L18H8, L20H8)
        >>> Heads.of([(1, 0), (1, 0), (0, 2)]).by_layer()
        {1: (0,), 0: (2,)}
    """

    __slots__ = ()

    @classmethod
    def of(cls, heads: HeadsLike) -> Heads:
        """Collect heads from pairs, names, or a comma-separated string, dropping repeats and keeping the order."""
        if isinstance(heads, Heads):
            return heads
        items: Iterable[HeadLike] = heads.split(",") if isinstance(heads, str) else heads
        parsed = (Head.parse(item) if isinstance(item, str) else Head(*map(int, item)) for item in items)
        return cls(dict.fromkeys(parsed))

    def by_layer(self) -> dict[int, tuple[int, ...]]:
        """Group the head indices by layer."""
        layers: dict[int, tuple[int, ...]] = {}
        for layer, head in self:
            layers[layer] = (*layers.get(layer, ()), head)
        return layers

    def without(self, others: HeadsLike) -> Heads:
        """Leave out the given heads."""
        gone = set(Heads.of(others))
        return Heads(head for head in self if head not in gone)

    def check(self, sites: Iterable[Site]) -> Heads:
        """Return the heads unchanged if the model has them all.

        Raises:
            HeadRangeError: A layer or head out of range; the message names the ranges and the kv heads.
        """
        by_layer = {site.layer: site for site in sites}
        for head in self:
            site = by_layer.get(head.layer)
            if site is None:
                last = max(by_layer, default=-1)
                raise HeadRangeError(
                    f"{head} is in no attention layer", expected=f"a layer in 0..{last}", got=head.layer
                )
            if not 0 <= head.head < site.heads:
                raise HeadRangeError(
                    f"{head} is not in layer {head.layer}",
                    expected=f"a query head in 0..{site.heads - 1} ({site.kv_heads} kv heads)",
                    got=head.head,
                )
        return self

    def __repr__(self) -> str:
        return f"Heads({', '.join(map(str, self))})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>L{layer}</td><td>{', '.join(f'H{head}' for head in heads)}</td></tr>"
            for layer, heads in sorted(self.by_layer().items())
        )
        return f"<table><caption>{len(self)} heads</caption><tr><th>layer</th><th>heads</th></tr>{rows}</table>"


@dataclass(frozen=True)
class Site:
    """One attention computation of a model: where it lives and what it may see.

    Attributes:
        layer: Index among the model's attention sites, in call order.
        path: Module path inside the model.
        kind: Causal self, bidirectional self, or cross attention.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
    """

    layer: int
    path: str
    kind: Kind
    heads: int
    kv_heads: int

    def kv_head(self, head: int) -> int:
        """The key/value head that serves a query head."""
        return head // (self.heads // self.kv_heads)


@dataclass(frozen=True)
class SinkKeys:
    """Which keys count as the sink of a row.

    Attributes:
        first: How many of the first *visible* tokens of each sequence count (padding is skipped on either side).
        positions: Explicit key positions ``[batch, n]`` or ``[batch, head, n]``; replaces ``first`` when given.
        learned: Whether the model's learned sink logit (a virtual key) counts, where the model has one.
    """

    first: int = 1
    positions: Tensor | None = None
    learned: bool = True

    def __post_init__(self) -> None:
        if self.positions is None and self.first < 1:
            raise InputError("a sink needs at least one key", expected="first >= 1", got=self.first)

    @classmethod
    def at(cls, *positions: int) -> SinkKeys:
        """Fix the same key positions for every sequence, counted in the (unpadded) sequence from 0."""
        if not positions or min(positions) < 0:
            raise InputError("sink positions count from 0", expected="one or more integers >= 0", got=positions)
        return cls(positions=torch.tensor([positions]))

    def select(self, rows: slice | Tensor) -> SinkKeys:
        """The keys of some sequences; unchanged where all sequences share theirs."""
        if self.positions is None or self.positions.ndim < 2 or len(self.positions) == 1:
            return self
        return SinkKeys(self.first, self.positions[rows], self.learned)

    def describe(self) -> str:
        """Say in words which keys are meant."""
        if self.positions is not None:
            return f"positions {sorted(set(self.positions.flatten().tolist()))[:8]}"
        return "the first visible token" if self.first == 1 else f"the first {self.first} visible tokens"
