"""The paper's attention-only transformer, with the normalizer as an object and TransformerLens names for its hooks.

No 1/sqrt(d) on the scores, no biases, no MLP, no layer norm and (for vector inputs) no positions, as the authors of
arXiv 2603.11487 coded it. One function, :func:`run`, computes it for a single model and for many models at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from sinklens.errors import InputError
from sinklens.normalizers import Normalizer, Softmax

Point = Callable[[str, Tensor], Tensor]
Weights = Mapping[str, Tensor]
INIT_STD = 0.02


class HookPoint(nn.Identity):
    """A named place in the computation; what a forward hook on it returns is used from there on."""

    name: str = ""


@dataclass(frozen=True)
class ToyConfig:
    """Shape and options of a toy model.

    Attributes:
        n_layers: Attention layers.
        n_heads: Heads a layer.
        d_model: Width of the residual stream; the width of a token for vector inputs.
        d_head: Width of a head; the paper has ``d_model`` for every head.
        n_ctx: Length it is trained on; without positions it runs at any length.
        residual: Whether each layer adds to its input.
        gated: Whether each head output is multiplied by ``sigmoid(x W_G)`` (arXiv 2505.06708).
        learned_sink: Whether each head has a trained exit logit: one more key of value 0.
        d_vocab: Number of token ids, or None for vector inputs.
    """

    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    n_ctx: int
    residual: bool
    gated: bool = False
    learned_sink: bool = False
    d_vocab: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.n_layers, self.n_heads, self.d_model, self.d_head, self.n_ctx)
        if min(sizes) < 1:
            raise InputError("a model has layers, heads and widths", expected="all of them >= 1", got=sizes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight."""
        into = (self.n_layers, self.n_heads, self.d_model, self.d_head)
        shapes: dict[str, tuple[int, ...]] = {"W_Q": into, "W_K": into, "W_V": into}
        shapes["W_O"] = (self.n_layers, self.n_heads, self.d_head, self.d_model)
        if self.gated:
            shapes["W_G"] = into
        if self.learned_sink:
            shapes["sink_logits"] = (self.n_layers, self.n_heads)
        if self.d_vocab is not None:
            shapes["W_E"] = (self.d_vocab, self.d_model)
            shapes["W_pos"] = (self.n_ctx, self.d_model)
            shapes["W_U"] = (self.d_model, self.d_vocab)
        return shapes

    def initial(self, generator: Generator) -> dict[str, Tensor]:
        """Weights drawn from N(0, 0.02^2), the authors' initialization."""
        return {name: torch.randn(shape, generator=generator) * INIT_STD for name, shape in self.shapes().items()}


def _untouched(name: str, tensor: Tensor) -> Tensor:
    return tensor


def run(
    weights: Weights, inputs: Tensor, config: ToyConfig, normalizer: Normalizer, point: Point | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Predictions of one model, or of many models at once.

    Args:
        weights: As in :meth:`ToyConfig.shapes`, all with the same leading ``model`` axis or none.
        inputs: ``[*model, batch, pos, d_model]``, or token ids ``[*model, batch, pos]``.
        config: The models' shape.
        normalizer: Scores to weights.
        point: Called at every hook point with its name and tensor; its result is used. None: no hooks.

    Returns:
        Predictions ``[*model, batch, pos, d_model]`` (or logits over the vocabulary) and each layer's pattern
        ``[*model, batch, head, query, key]``.
    """
    visit = point or _untouched
    x = inputs if config.d_vocab is None else _embed(weights, inputs, config)
    patterns = []
    axis = weights["W_Q"].ndim - 4  # the layer axis, behind a model axis if there is one
    for layer in range(config.n_layers):
        part = {name: weight.select(axis, layer) for name, weight in weights.items() if name not in _EMBEDDINGS}
        x = visit(f"blocks.{layer}.hook_resid_pre", x)
        if point is None and "W_G" not in part:
            update, pattern = _folded_attention(part, x, normalizer)
        else:
            update, pattern = _attention(part, x, normalizer, f"blocks.{layer}.attn.", point)
        x = visit(f"blocks.{layer}.hook_resid_post", x + update if config.residual else update)
        patterns.append(pattern)
    return (x if config.d_vocab is None else x @ weights["W_U"].unsqueeze(-3)), patterns


_EMBEDDINGS = ("W_E", "W_pos", "W_U")


def _embed(weights: Weights, tokens: Tensor, config: ToyConfig) -> Tensor:
    if tokens.shape[-1] > config.n_ctx:
        raise InputError("this model has learned positions", expected=f"at most {config.n_ctx}", got=tokens.shape[-1])
    one_hot = nn.functional.one_hot(tokens, config.d_vocab or -1).float()
    positions = weights["W_pos"][..., : tokens.shape[-1], :]
    return one_hot @ weights["W_E"].unsqueeze(-3) + positions.unsqueeze(-3)


def _attention(
    part: Weights, x: Tensor, normalizer: Normalizer, prefix: str, point: Point | None
) -> tuple[Tensor, Tensor]:
    visit = point or _untouched
    q, k, v = (
        visit(f"{prefix}hook_{name.lower()}", torch.einsum("...bpd,...hde->...bphe", x, part[f"W_{name}"]))
        for name in "QKV"
    )  # each [*model, batch, pos, head, d_head]
    scores = torch.einsum("...bqhe,...bkhe->...bhqk", q, k)  # [*model, batch, head, query, key]
    visible = causal(x.shape[-2])
    if point is not None:
        # Only hooks need the marked entries: the normalizer is told what is visible.
        hidden = torch.finfo(scores.dtype).min
        scores = visit(f"{prefix}hook_attn_scores", scores.masked_fill(~visible, hidden))
    sink_logits = part["sink_logits"][..., None, :, None] if "sink_logits" in part else None
    pattern = visit(f"{prefix}hook_pattern", _weights(scores, visible, normalizer, sink_logits))
    z = visit(f"{prefix}hook_z", torch.einsum("...bhqk,...bkhe->...bqhe", pattern, v))
    if "W_G" in part:
        z = z * torch.sigmoid(torch.einsum("...bpd,...hde->...bphe", x, part["W_G"]))
    return torch.einsum("...bphe,...hed->...bpd", z, part["W_O"]), pattern


def _folded_attention(part: Weights, x: Tensor, normalizer: Normalizer) -> tuple[Tensor, Tensor]:
    """The same numbers without queries, keys and values: ``W_Q W_K^T`` and ``W_V W_O`` are folded first.

    Heads are as wide as the model here, so this halves the products; and with the heads beside the queries,
    ``[batch, (query head), key]``, no tensor is ever copied into another order.
    """
    qk = part["W_Q"] @ part["W_K"].transpose(-1, -2)  # [*model, head, d_model, d_model]
    ov = part["W_V"] @ part["W_O"]
    *batch, length, width = x.shape
    heads, rows = qk.shape[-3], (*x.shape[:-3], -1)
    asked = x.flatten(-3, -2) @ qk.transpose(-3, -2).flatten(-2)  # [*model, (batch query), (head d_model)]
    scores = asked.view(*batch, length * heads, width) @ x.transpose(-1, -2)  # [*model, batch, (query head), key]
    weights = _weights(scores.view(*batch, length, heads, length), causal(length)[:, None], normalizer,
                       None if "sink_logits" not in part else part["sink_logits"][..., None, None, :])  # fmt: skip
    read = weights.reshape(*batch, length * heads, length) @ x
    update = read.view(*rows, heads * width) @ ov.flatten(-3, -2)
    return update.view(x.shape), weights.transpose(-3, -2)


def causal(length: int) -> Tensor:
    """Which keys each query may see: itself and all before it, ``[query, key]``."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def _weights(scores: Tensor, visible: Tensor, normalizer: Normalizer, sink_logits: Tensor | None) -> Tensor:
    sinks = torch.arange(scores.shape[-1]) == 0
    if sink_logits is None:
        return normalizer.weights(scores, visible, sinks)
    # One more column of scores, the same for every query of a head; its weight is thrown away.
    column = sink_logits[..., None].expand(*scores.shape[:-1], 1)
    seen = torch.cat([visible, torch.ones_like(visible[..., :1])], -1)
    both = torch.cat([scores, column], -1)
    return normalizer.weights(both, seen, torch.cat([sinks, sinks.new_ones(1)]))[..., :-1]


class ToyTransformer(nn.Module):
    """One attention-only transformer that tools for hooked models can watch and edit.

    Example:
        >>> model = ToyTransformer(ToyConfig(1, 1, 16, 16, 16, residual=False), Softmax())
        >>> model(torch.zeros(2, 16, 16)).shape
        torch.Size([2, 16, 16])

    Attributes:
        cfg: Its shape.
        normalizer: Scores to weights, in every head.
        W_O: Output matrices ``[layer, head, d_head, d_model]``; W_Q, W_K, W_V ``[layer, head, d_model, d_head]``.
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor

    def __init__(self, cfg: ToyConfig, normalizer: Normalizer | None = None, weights: Weights | None = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.normalizer = normalizer or Softmax()
        given = dict(weights or cfg.initial(Generator().manual_seed(0)))
        shapes = {name: tuple(weight.shape) for name, weight in given.items()}
        if shapes != cfg.shapes():
            raise InputError("the weights fit the configuration", expected=cfg.shapes(), got=shapes)
        for name, weight in given.items():
            self.register_parameter(name, nn.Parameter(weight.detach().clone().float()))
        self.blocks = nn.ModuleList(_block() for _ in range(cfg.n_layers))
        self.hook_dict: dict[str, HookPoint] = {}
        for name, module in self.named_modules():
            if isinstance(module, HookPoint):
                module.name, self.hook_dict[name] = name, module

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions ``[batch, pos, n]`` from ``[batch, pos, n]``, or logits from token ids ``[batch, pos]``.

        Raises:
            InputError: Inputs of another width or kind.
        """
        width = self.cfg.d_model
        if self.cfg.d_vocab is None and (inputs.ndim != 3 or inputs.shape[-1] != width):
            raise InputError("the inputs fit the model", expected=f"[batch, pos, {width}]", got=tuple(inputs.shape))
        if self.cfg.d_vocab is not None and (inputs.ndim != 2 or inputs.dtype.is_floating_point):
            raise InputError("this model takes token ids", expected="integers [batch, pos]", got=tuple(inputs.shape))
        weights = dict(self.named_parameters(recurse=False))
        return run(weights, inputs, self.cfg, self.normalizer, lambda name, x: self.hook_dict[name](x))[0]

    def probe(self) -> Tensor:
        """Inputs for one forward pass, for tools that must try the model."""
        if self.cfg.d_vocab is not None:
            return (torch.arange(min(12, self.cfg.n_ctx)) * 7 + 3).remainder(self.cfg.d_vocab)[None]
        inputs = torch.rand(2, self.cfg.n_ctx, self.cfg.d_model, generator=Generator().manual_seed(0))
        inputs[:, 0] = torch.eye(self.cfg.d_model)[0]
        return inputs

    def run_with_hooks(self, inputs: Tensor, fwd_hooks: Sequence[tuple[str, Callable[[Tensor, HookPoint], Any]]] = ()
                       ) -> Tensor:  # fmt: skip
        """Run with functions ``f(tensor, hook)`` at named points; a returned tensor replaces the one passed in.

        Raises:
            InputError: A name that is no hook point.
        """
        with self._hooked(fwd_hooks):
            return self(inputs)

    def run_with_cache(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Run and keep what passed every hook point, by name."""
        cache: dict[str, Tensor] = {}

        def keep(tensor: Tensor, hook: HookPoint) -> None:
            cache[hook.name] = tensor.detach()

        return self.run_with_hooks(inputs, [(name, keep) for name in self.hook_dict]), cache

    @contextmanager
    def _hooked(self, hooks: Sequence[tuple[str, Callable[[Tensor, HookPoint], Any]]]) -> Iterator[None]:
        handles = []
        try:
            for name, function in hooks:
                if name not in self.hook_dict:
                    raise InputError("no such hook point", expected=f"one of {sorted(self.hook_dict)}", got=repr(name))
                handles.append(self.hook_dict[name].register_forward_hook(_adapted(function)))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _adapted(function: Callable[[Tensor, HookPoint], Any]) -> Callable[..., Any]:
    return lambda module, inputs, output: function(output, module)


def _block() -> nn.ModuleDict:
    attention = ("hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern", "hook_z")
    return nn.ModuleDict(
        {
            "hook_resid_pre": HookPoint(),
            "attn": nn.ModuleDict({name: HookPoint() for name in attention}),
            "hook_resid_post": HookPoint(),
        }
    )
