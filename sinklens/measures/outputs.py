"""Output measures: how much a head writes, and whether its sink's value is empty (NOP) or a message (broadcast)."""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor


def gram(output_matrix: Float[Tensor, "head d_value d_model"]) -> Float[Tensor, "head d_value d_value"]:
    """``G_h = W_O^h W_O^h^T``: with it a norm after the output projection costs d_value^2, no d_model vector."""
    return einsum(output_matrix, output_matrix, "h d m, h e m -> h d e")


def projected_norm(
    vectors: Float[Tensor, "batch head pos d_value"], grams: Float[Tensor, "head d_value d_value"]
) -> Float[Tensor, "batch head pos"]:
    """Norm after the output projection, ``sqrt(x^T G_h x)``, float32."""
    vectors = vectors.float()
    return (torch.matmul(vectors, grams) * vectors).sum(-1).clamp(min=0.0).sqrt()


def value_kind(ratio: float, *, nop: float = 0.2, broadcast: float = 0.5) -> str:
    """Name a sink by its value ratio ``|W_O v_sink| / mean |W_O v_other|`` (thresholds from arXiv 2606.08105).

    ``nop`` at or below 0.2, ``broadcast`` at or above 0.5, else ``between``; the ratio alone cannot show that a
    broadcast sink's update has rank one.
    """
    return "nop" if ratio <= nop else "broadcast" if ratio >= broadcast else "between"
