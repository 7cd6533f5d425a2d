"""Proof that a route reaches a model's computation, on a small probe, before any number is reported."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sinklens.attention import AttentionCall, AttentionResult, Edit, Inner
from sinklens.backends import Backend, backend_for
from sinklens.errors import PatchNotAppliedError, UnsupportedModelError
from sinklens.normalizers import Constant

PROBE_LENGTH = 12
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 0.05
_PROVEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True)
class Proof:
    """What the probe showed.

    Attributes:
        model: Class of the model.
        served_by: The seam that serves it.
        sites: Attention sites, each called exactly once.
        largest_difference: Largest absolute change of a logit under the softmax route.
        future_mass: Largest attention mass above the diagonal.
        edit_effect: Largest absolute change of a logit when every head is silenced.
    """

    model: str
    served_by: str
    sites: int
    largest_difference: float
    future_mass: float
    edit_effect: float


@dataclass
class _Census:
    """A watching route that counts the mass above the diagonal."""

    future_mass: float = 0.0
    seen: list[str] = field(default_factory=list)

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult:
        result = inner(call)
        self.seen.append(call.site.path)
        if call.site.kind == "causal" and call.queries == call.keys:
            above = result.weights().triu(1).sum(-1).max()
            self.future_mass = max(self.future_mass, float(above))
        return result


def _silence(call: AttentionCall, inner: Inner) -> AttentionResult:
    return inner(call.edited(Edit(tuple(range(call.heads)), Constant())))


def verify(model: object, probe: Tensor | None = None) -> Proof:
    """Prove on a probe that every attention call of a model can be watched and changed.

    Four checks: the softmax route reproduces the untouched logits; every attention site is called exactly once; a
    causal model puts no mass above the diagonal; silencing the heads moves the logits.

    Args:
        model: A transformers model, a TransformerBridge, or a model with TransformerLens hooks.
        probe: Inputs for one forward pass, for models that do not take token ids; default: 12 arbitrary tokens.

    Raises:
        UnsupportedModelError: The routed computation differs from the model's own.
        PatchNotAppliedError: A site was not reached, or an edit has no effect.
    """
    backend = backend_for(model)
    probe = _default_probe(backend.model) if probe is None else probe
    name = type(backend.model).__name__
    census = _Census()
    with evaluating(backend.model), torch.no_grad():
        clean = backend.forward(probe)
        with backend.attach(census) as log:
            routed = backend.forward(probe)
        with backend.attach(_silence):
            silenced = backend.forward(probe)
    _check_calls(name, backend, log.calls, census.seen)
    tolerance = _TOLERANCE.get(clean.dtype, _LOW_PRECISION_TOLERANCE)
    scale = max(1.0, float(clean.abs().max()))
    difference, effect = (float((other - clean).abs().max()) for other in (routed, silenced))
    if not difference <= tolerance * scale:
        raise UnsupportedModelError(
            f"routed attention differs from {name}'s own",
            expected=f"logits within {tolerance * scale:.2g}",
            got=f"{difference:.3g}",
        )
    if census.future_mass > 0:
        raise UnsupportedModelError(
            f"a causal layer of {name} attends to the future", expected="no mass above the diagonal",
            got=f"{census.future_mass:.3g}",
        )  # fmt: skip
    if not effect > 0:
        raise PatchNotAppliedError(
            f"silencing every head of {name} has no effect", expected="moved logits", got="unmoved logits"
        )
    _PROVEN.add(backend.model)
    return Proof(name, backend.served_by, len(backend.sites), difference, census.future_mass, effect)


def verified(model: object, probe: Tensor | None = None) -> Backend:
    """The backend of a model, after :func:`verify` has passed once for it."""
    backend = backend_for(model)
    if backend.model not in _PROVEN or len(backend.sites) == 0:
        verify(model, probe)
    return backend


def _check_calls(name: str, backend: Backend, calls: dict[int, int], seen: list[str]) -> None:
    wrong = {layer: calls.get(layer, 0) for layer in range(backend.expected_sites) if calls.get(layer, 0) != 1}
    if wrong:
        raise PatchNotAppliedError(
            f"not every attention layer of {name} called the route once",
            expected=f"one call from each of {backend.expected_sites} layers",
            got=f"calls by layer {dict(list(wrong.items())[:6])}; called: {seen[:4] or 'none'}",
        )


def _default_probe(model: nn.Module) -> Tensor:
    own = getattr(model, "probe", None)
    if callable(own):
        return own()
    vocabulary = _vocabulary(model)
    if vocabulary is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take plain token ids",
            expected="a probe input (`verify(model, probe=...)`), or a model with a vocabulary",
            got="no vocab_size and no decoder-only input",
        )
    device = next(model.parameters()).device
    return ((torch.arange(PROBE_LENGTH, device=device) * 7 + 3) % vocabulary)[None]


def _vocabulary(model: nn.Module) -> int | None:
    config = getattr(model, "config", None) or getattr(model, "cfg", None)
    if getattr(config, "is_encoder_decoder", False) and hasattr(model, "get_decoder") and hasattr(model, "lm_head"):
        return None
    get_text_config = getattr(config, "get_text_config", None)
    text = get_text_config() if callable(get_text_config) else config
    return getattr(text, "vocab_size", None) or getattr(text, "d_vocab", None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; each module gets its own training flag back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
