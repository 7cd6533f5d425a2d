"""Several heads' normalizers of one form as one: their numbers lie along the head axis, and the heads run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from sinklens.normalizers.base import Normalizer


def stacked(normalizers: Sequence[Normalizer]) -> Normalizer | None:
    """One normalizer for as many heads, in their order; None if they differ in more than numbers.

    Numbers become ``[head, 1, 1]`` and vectors ``[head, 1, d_value]``, which broadcast against scores ``[batch, head,
    query, key]`` and outputs ``[batch, head, query, d_value]``: the result serves exactly these heads and no others.
    """
    first = normalizers[0]
    if all(other is first for other in normalizers):
        return first
    if any(type(other) is not type(first) for other in normalizers):
        return None
    changed: dict[str, Any] = {}
    for name in (field.name for field in fields(first)):
        values = [getattr(normalizer, name) for normalizer in normalizers]
        if isinstance(values[0], Normalizer):
            changed[name] = stacked(values)
            if changed[name] is None:
                return None
        elif isinstance(values[0], Tensor):
            changed[name] = torch.stack(values)[:, None]
        elif any(value != values[0] for value in values):
            if not isinstance(values[0], float):
                return None
            changed[name] = torch.tensor(values)[:, None, None]
    return replace(first, **changed)
