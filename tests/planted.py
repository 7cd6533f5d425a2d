"""Tiny random models with planted heads: parked on a beginning-of-sequence id, except at chosen ids."""

from __future__ import annotations

from typing import Any

import torch

import sinklens as sl
from tests import tiny

BOS = 1
_SIZE, _HEADS, _WIDTH = 32, 4, 8
_CONSTANT, _IS_BOS, _FIRST_MARK = 0, 1, 2  # reserved coordinates of the embedding


def model(family: str, plants: dict[tuple[int, int], tuple[int, ...]], *, seed: int = 0, strength: float = 12.0) -> Any:
    """A tiny model whose heads ``{(layer, head): ids}`` give the BOS id a score of ``strength``, and less than 0 at ids.

    Coordinates of the embedding mark every token, BOS, and the ids of each plant; one row of each query matrix and one
    of each key matrix read them. All other weights are as at initialization.
    """
    made = tiny.causal(family, seed=seed, gain=1)
    body = made.transformer if family == "GPT2" else made.model
    embedding = body.wte.weight if family == "GPT2" else body.embed_tokens.weight
    reserved = _FIRST_MARK + len(plants)
    with torch.no_grad():
        for table in (embedding, *([body.wpe.weight] if family == "GPT2" else [])):
            table[:, :reserved] = 0
        embedding[:, _CONSTANT] = 0.05
        embedding[BOS, _IS_BOS] = 0.5
        for (layer, head), _ in plants.items():
            _clear(body, family, layer, head)
        for mark, ((layer, head), ids) in enumerate(plants.items(), start=_FIRST_MARK):
            embedding[list(ids), mark] = 0.1
            query, key = _rows(body, family, layer, head)
            # After normalization the constant is about 2 and a mark about 3.6; BOS is about 5.4.
            query[_CONSTANT], query[mark] = 0.5, -1.0
            key[_IS_BOS] = strength * _WIDTH**0.5 / 5.4
    return made


def _rows(body: Any, family: str, layer: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a head's query and key matrices that belong to the slowest rotation: 3 of (3, 7)."""
    if family == "GPT2":
        both = body.h[layer].attn.c_attn.weight.T
        return both[head * _WIDTH + 3], both[_SIZE + head * _WIDTH + 3]
    attention = body.layers[layer].self_attn
    return attention.q_proj.weight[head * _WIDTH + 3], attention.k_proj.weight[head // 2 * _WIDTH + 3]


def _clear(body: Any, family: str, layer: int, head: int) -> None:
    # Heads that share a key must not read it by chance.
    for other in (head, *((head ^ 1,) if family != "GPT2" else ())):
        for row in _rows(body, family, layer, other):
            row.zero_()


def prompts(count: int = 80, length: int = 64, *, seed: int = 0, before: int = 0, left_pad: int = 0) -> sl.PromptSet:
    """Random ids below 36 with the BOS id after ``before`` other tokens, and padding on the left."""
    drawn = tiny.tokens(count, length, seed, vocab=36)
    drawn[:, before] = BOS
    padded = torch.cat([torch.zeros(count, left_pad, dtype=torch.long), drawn], 1)
    return sl.PromptSet.from_tokens(padded, torch.arange(padded.shape[1]).expand_as(padded) >= left_pad)
