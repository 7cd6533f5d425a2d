"""Tiny GPT-2s with one head whose answer is known: written weights, everything else as at initialization.

The planted head reads marks that the embedding carries. A score of ``strength`` draws every query to the first token,
unless the query is a trigger; then the first token is pushed away and the head returns the mean of the content.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import transformers as hf

import sinklens as sl

Kind = Literal["clean", "constant", "broadcast", "redundant", "asleep", "graded", "random"]
EXPECTED: dict[Kind, tuple[str, ...]] = {
    "clean": ("supports fully", "supports partly"),
    "constant": ("constant bias",),
    "broadcast": ("broadcast",),
    "redundant": ("redundant",),
    "asleep": ("always dormant",),
    "graded": ("graded",),
}
"""The verdict that each plant must get."""

_SIZE, _HEADS, _WIDTH, _VOCAB = 32, 4, 8, 64
_CONSTANT, _FIRST, _TRIGGER, _FEATURE, _CONTENT = 0, 1, 2, 3, 8
TRIGGERS = tuple(range(10, 18))


def plant(kind: Kind, seed: int, *, strength: float = 14.0) -> Any:
    """A two-layer model whose head L0H1 is of the given kind."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    config = hf.GPT2Config(vocab_size=_VOCAB, n_embd=_SIZE, n_layer=2, n_head=_HEADS, n_positions=128,
                           bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    model = hf.GPT2LMHeadModel(config).eval()
    if kind == "random":
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8)
        return model
    body = model.transformer
    with torch.no_grad():
        table, places = body.wte.weight, body.wpe.weight
        places.zero_()
        table[:, :_CONTENT] = 0
        content = torch.randn(_VOCAB, _SIZE - _CONTENT, generator=draw)
        content -= content.mean(-1, keepdim=True)
        # Equal norms: the layer norm then scales the marks of all tokens alike.
        table[:, _CONTENT:] = content * (_SIZE - _CONTENT) ** 0.5 / content.norm(dim=-1, keepdim=True)
        # Mild logits: a distribution that is sure of itself hides every effect.
        body.ln_f.weight.fill_(0.15)
        table[:, _CONSTANT] = 1.0
        table[:, _FEATURE] = torch.randn(_VOCAB, generator=draw) if kind == "graded" else 0.0
        table[list(TRIGGERS), _TRIGGER] = 3.0
        if kind == "broadcast":
            places[0, _FIRST] = 3.0
        else:
            table[1] = 0.0
            table[1, _CONSTANT], table[1, _FIRST] = 1.0, 3.0
        attention = body.h[0].attn
        for head in (1, 2) if kind == "redundant" else (1,):
            _write(attention, head, kind, strength, torch.Generator().manual_seed(seed))
    return model


def _write(attention: Any, head: int, kind: Kind, strength: float, draw: torch.Generator) -> None:
    part = slice(head * _WIDTH, (head + 1) * _WIDTH)
    query, key, value = (attention.c_attn.weight[:, i * _SIZE : (i + 1) * _SIZE][:, part] for i in range(3))
    output = attention.c_proj.weight[part]
    for matrix in (query, key, value):
        matrix.zero_()
    # After normalization the constant is about 1, a mark about 3 (5 at the first token, which is all mark).
    query[_CONSTANT, 0] = 1.0
    if kind in ("clean", "redundant"):
        query[_TRIGGER, 0] = -0.8
    if kind == "graded":
        strength = 4.6
        query[_FEATURE, 0] = 0.1
    mark = 2.7 if kind == "broadcast" else 5.3
    key[_FIRST, 0] = strength * _WIDTH**0.5 / mark
    content = 0.5 * torch.randn(_SIZE - _CONTENT, _WIDTH, generator=draw)
    # Rows that sum to zero keep the value of a token without content at zero.
    value[_CONTENT:] = content - content.mean(0)
    if kind == "constant":
        value[_FIRST] = 0.4 * torch.randn(_WIDTH, generator=draw)
    scale = 200.0 if kind == "redundant" else 0.5
    output[:] = scale * torch.randn(_WIDTH, _SIZE, generator=draw)


def prompts(kind: Kind, seed: int = 0, count: int = 16, length: int = 64) -> sl.PromptSet:
    """Random tokens after the first one: BOS, or any token where the sink is to be a place."""
    draw = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(3, _VOCAB, (count, length), generator=draw)
    if kind != "broadcast":
        tokens[:, 0] = 1
    return sl.PromptSet.from_tokens(tokens)


def contrast_of(kind: Kind, seed: int) -> sl.Contrast:
    """The planted head, changed in every way that a verdict needs."""
    return sl.contrast(plant(kind, seed), prompts(kind, seed), "L0H1", interventions=["Z"], judge=True, controls=False,
                       resamples=500, progress=False)  # fmt: skip


def verdict(kind: Kind, seed: int) -> sl.causal.Verdicts:
    """The verdict on the planted head."""
    return contrast_of(kind, seed).verdicts()
