"""HuggingFace transformers: routes attach through the attention interface, one function for every family.

A model that ignores the interface keeps its own attention and only logs a line; here that is an error. The mask
function is registered with the attention function: without it causality would be lost silently.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sinklens.attention import AttentionCall, Route
from sinklens.backends.protocol import CallLog, CleanRun, RouteStack, device_of
from sinklens.errors import PatchNotAppliedError, UnsupportedModelError
from sinklens.vocabulary import Kind, Site

IMPLEMENTATION = "sinklens"

_ATTENTION = re.compile(r"Attention(?!.*(Output|Mask|Pool))")
_CROSS = re.compile(r"encdec|encoder_attn|cross", re.IGNORECASE)
# Which model's routes serve an attention module; weak, so that attaching keeps no model alive.
_SERVED: weakref.WeakKeyDictionary[nn.Module, tuple[HuggingFace, int]] = weakref.WeakKeyDictionary()
_BACKENDS: weakref.WeakKeyDictionary[nn.Module, HuggingFace] = weakref.WeakKeyDictionary()


def huggingface(model: PreTrainedModel) -> HuggingFace:
    """The backend of a transformers model; one a model, so that nested patches share their routes."""
    backend = _BACKENDS.get(model)
    if backend is None or not backend.current():
        backend = _BACKENDS[model] = HuggingFace(model)
    return backend


class HuggingFace:
    """Routes the attention of a ``PreTrainedModel`` through ``AttentionInterface``."""

    served_by = "transformers AttentionInterface"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._modules = _attention_modules(model)
        if not self._modules:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no attention module that transformers can route",
                expected="a transformer whose attention classes use the AttentionInterface",
                got=f"modules {sorted({type(module).__name__ for module in model.modules()})[:6]}",
            )
        self._sites: dict[int, Site] = {}
        self._stack = RouteStack()

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise PatchNotAppliedError("the model is gone", expected="a model that is still referenced", got="None")
        return model

    def current(self) -> bool:
        """Whether the model still has the attention modules it had when this backend was made."""
        return [module for _, module in _attention_modules(self.model)] == [module for _, module in self._modules]

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self._sites[layer] for layer in sorted(self._sites))

    @property
    def expected_sites(self) -> int:
        return len(self._modules)

    @contextmanager
    def attach(self, route: Route) -> Iterator[CallLog]:
        if self._stack.routes:
            with self._stack.pushed(route) as log:
                yield log
            return
        _register()
        for layer, (_, module) in enumerate(self._modules):
            _SERVED[module] = (self, layer)
        with self._stack.pushed(route) as log, _implementation(self.model, IMPLEMENTATION):
            yield log

    @contextmanager
    def recording(self) -> Iterator[CleanRun]:
        run = CleanRun()

        def keep(index: int, output: object) -> None:
            run.outputs[index] = output

        handles = [
            block.register_forward_hook(lambda module, inputs, output, index=index: keep(index, output))
            for index, block in enumerate(self._blocks)
        ]
        try:
            yield run
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def replaying(self, run: CleanRun, layer: int, copies: int) -> Iterator[None]:
        path = self._modules[layer][0]
        here = next((i for i, block in enumerate(self._blocks) if _inside(self.model, block, path)), 0)
        if here == 0:
            yield
            return
        replayed = _repeated(run.outputs[here - 1], copies)
        try:
            for block in self._blocks[:here]:
                # An instance attribute shadows the method of the class until it is deleted.
                block.forward = lambda *args, **kwargs: replayed
            yield
        finally:
            for block in self._blocks[:here]:
                block.__dict__.pop("forward", None)

    @cached_property
    def _blocks(self) -> list[nn.Module]:
        """The residual blocks in order: the module list that holds the attention sites, if there is just one."""
        lists = {path: part for path, part in self.model.named_modules() if isinstance(part, nn.ModuleList)}
        holding = {
            next((p for p in sorted(lists, key=len) if path.startswith(f"{p}.")), None) for path, _ in self._modules
        }
        only = holding.pop() if len(holding) == 1 else None
        # A block whose forward the user has replaced (accelerate's offloading does) is run as it is, not skipped.
        usable = only is not None and not any("forward" in vars(block) for block in lists[only])
        return list(lists[only]) if only is not None and usable else []

    def forward(self, inputs: Tensor, mask: Tensor | None = None, *, logits: bool = True) -> Tensor:
        model = self.model if logits else self.model.base_model
        arguments: dict[str, Any] = {"input_ids": inputs.to(device_of(self.model))}
        if mask is not None:
            arguments["attention_mask"] = mask.to(device_of(self.model))
        if hasattr(self.model.config, "use_cache"):
            arguments["use_cache"] = False
        output = model(**arguments)
        result = output.logits if logits and "logits" in output else output[0]
        return result

    def output_matrix(self, site: Site) -> Tensor:
        path, module = self._modules[site.layer]
        projection = _output_projection(self.model, path, module)
        # A linear map is read off its action, so that Conv1D and quantized layers need no special case.
        width = _in_features(projection)
        reference = next((p for p in projection.parameters() if p.is_floating_point()), torch.zeros(()))
        identity = torch.eye(width, dtype=reference.dtype, device=device_of(self.model))
        with torch.no_grad():
            matrix = (projection(identity) - projection(torch.zeros_like(identity[:1]))).float()
        return rearrange(matrix, "(h d) m -> h d m", h=site.heads)

    def call(self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
             **kwargs: Any) -> Tensor:  # fmt: skip
        """Serve one call of the attention interface: ``[batch, query, head, d_value]``."""
        site = self._site(layer, module, query, key)
        causal = kwargs.get("is_causal")
        positions = kwargs.get("position_ids")
        scale = kwargs.get("scaling")
        call = AttentionCall(
            site=site,
            query=query,
            key=key,
            value=value,
            mask=mask,
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=kwargs.get("softcap"),
            bias=kwargs.get("position_bias"),
            sink_logit=kwargs.get("s_aux"),
            last_position=positions[:, -1] if isinstance(positions, Tensor) and positions.ndim == 2 else None,
            rolling=kwargs.get("sliding_window") is not None,
        )
        return self._stack.run(call).output.transpose(1, 2).contiguous()

    def _site(self, layer: int, module: nn.Module, query: Tensor, key: Tensor) -> Site:
        path = self._modules[layer][0]
        causal = bool(getattr(module, "is_causal", getattr(module, "is_decoder", True)))
        kind: Kind = "cross" if _CROSS.search(path) else "causal" if causal else "bidirectional"
        self._sites[layer] = Site(layer, path, kind, query.shape[1], key.shape[1])
        return self._sites[layer]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    served = _SERVED.get(module)
    if served is None:
        raise PatchNotAppliedError(
            "an attention module was called outside its model", expected="a module found on attach", got=type(module)
        )
    if dropout:
        raise PatchNotAppliedError(
            "attention dropout would be lost under a route", expected="model.eval()", got=f"dropout {dropout}"
        )
    backend, layer = served
    return backend.call(layer, module, query, key, value, attention_mask, **kwargs), None


def _register() -> None:
    if IMPLEMENTATION not in AttentionInterface().valid_keys():
        AttentionInterface.register(IMPLEMENTATION, _attention)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch the attention implementation of a model and all its parts, and put every config back exactly."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(config): config for part in parts for config in _configs(part.config)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    if not all(part._can_set_attn_implementation() for part in parts):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use transformers' AttentionInterface",
            expected="a family that does (Llama, Mistral, Qwen, Gemma, GPT-2, GPT-NeoX, OPT, Phi, OLMo, BERT, ...)",
            got=f"a family with its own attention code ({model.config.model_type})",
        )
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for key in getattr(config, "sub_configs", ()):
        if (part := getattr(config, key, None)) is not None:
            yield from _configs(part)


def _attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The innermost modules that compute attention, in module order."""
    named = [(path, module) for path, module in model.named_modules() if _ATTENTION.search(type(module).__name__)]
    outer = {path for path, _ in named for other, _ in named if other.startswith(f"{path}.")}
    return [(path, module) for path, module in named if path not in outer]


def _inside(model: nn.Module, block: nn.Module, path: str) -> bool:
    module = model.get_submodule(path)
    return any(part is module for part in block.modules())


def _repeated(output: Any, copies: int) -> Any:
    if isinstance(output, Tensor):
        return output.repeat(copies, *(1,) * (output.ndim - 1))
    return type(output)(_repeated(part, copies) for part in output) if isinstance(output, (tuple, list)) else output


def _in_features(module: nn.Module) -> int:
    width = getattr(module, "in_features", None)
    # transformers' Conv1D (GPT-2) keeps [in, out].
    return int(width) if width is not None else int(module.get_parameter("weight").shape[0])


def _output_projection(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """The linear layer that maps concatenated head outputs back to the residual stream."""
    names = ("o_proj", "out_proj", "c_proj", "dense", "wo", "Wo", "o", "out_lin")
    parent = model.get_submodule(path.rpartition(".")[0])
    candidates = [getattr(module, name, None) for name in names]
    candidates += [getattr(getattr(parent, "output", None), "dense", None)]
    found = next((candidate for candidate in candidates if isinstance(candidate, nn.Module)), None)
    if found is None:
        raise UnsupportedModelError(
            f"the output projection of {path} was not found",
            expected=f"a linear layer named one of {', '.join(names)}",
            got=", ".join(name for name, _ in module.named_children()),
        )
    return found
