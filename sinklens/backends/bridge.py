"""TransformerLens: routes attach at ``hook_attn_scores`` and ``hook_pattern``, by duck typing.

Serves ``TransformerBridge``, older ``HookedTransformer`` objects and the toy models alike: whatever has ``hook_dict``,
``cfg`` and the hook names. Plain torch forward hooks are used, so the user's own hooks are neither removed nor
reordered. A component that fires its hooks after use would drop edits; ``verify`` finds that out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinklens.attention import AttentionCall, Route, Rows, attention_weights
from sinklens.backends.protocol import CallLog, CleanRun, RouteStack
from sinklens.errors import PatchNotAppliedError, UnsupportedModelError
from sinklens.normalizers import Normalizer, Softmax
from sinklens.vocabulary import Site

_BACKENDS: weakref.WeakKeyDictionary[nn.Module, Hooked] = weakref.WeakKeyDictionary()
_HOOKS = ("hook_v", "hook_attn_scores", "hook_pattern", "hook_z")


@dataclass(frozen=True, eq=False)
class ScoredCall(AttentionCall):
    """A call whose scores the model has computed already; they stand in place of the query."""

    def scores(self, rows: Rows = slice(None)) -> Tensor:
        return self.query[:, :, rows].float()


def hooked(model: nn.Module) -> Hooked:
    """The backend of a hooked model; one a model, so that nested patches share their routes."""
    backend = _BACKENDS.get(model)
    if backend is None:
        backend = _BACKENDS[model] = Hooked(model)
    return backend


def boot(model: nn.Module, tokenizer: Any, source: str) -> nn.Module:
    """Wrap a transformers model that is already loaded in a TransformerBridge.

    Args:
        model: The transformers model.
        tokenizer: Its tokenizer.
        source: Folder or hub name it came from; the bridge reads the configuration there.

    Raises:
        UnsupportedModelError: TransformerLens is missing, or does not know the architecture.
    """
    try:
        from transformer_lens.model_bridge import TransformerBridge

        device = next(model.parameters()).device
        bridge: nn.Module = TransformerBridge.boot_transformers(
            source, hf_model=model, tokenizer=tokenizer, device=str(device)
        )
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(
            "TransformerLens cannot serve this model", expected="transformer-lens and an architecture it knows",
            got=f"{type(model).__name__} ({str(error).strip().splitlines()[0][:120]})",
        ) from None  # fmt: skip
    return bridge.eval()


class Hooked:
    """Routes the attention of a model with TransformerLens hook names."""

    served_by = "TransformerLens hooks"

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        config: Any = model.cfg
        points: Any = model.hook_dict
        layers = [i for i in range(config.n_layers) if f"blocks.{i}.attn.hook_pattern" in points]
        missing = [f"blocks.{i}.attn.{name}" for i in layers for name in _HOOKS
                   if f"blocks.{i}.attn.{name}" not in points]  # fmt: skip
        if missing or not layers:
            raise UnsupportedModelError(
                f"{type(model).__name__} lacks attention hooks",
                expected=f"{', '.join(_HOOKS)} in every attention block",
                got=f"no {missing[0]}" if missing else "no attention block",
            )
        kv_heads = getattr(config, "n_key_value_heads", None) or config.n_heads
        kind = "bidirectional" if getattr(config, "attention_dir", "causal") == "bidirectional" else "causal"
        # Toy models may run on another normalizer than softmax and say so.
        self._native: Normalizer = getattr(model, "normalizer", None) or Softmax()
        self._all = tuple(
            Site(index, f"blocks.{block}.attn", kind, config.n_heads, kv_heads)  # type: ignore[arg-type]
            for index, block in enumerate(layers)
        )
        self._stack = RouteStack()
        self._pending: dict[int, dict[str, Any]] = {}

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise PatchNotAppliedError("the model is gone", expected="a model that is still referenced", got="None")
        return model

    @property
    def sites(self) -> tuple[Site, ...]:
        return self._all

    @property
    def expected_sites(self) -> int:
        return len(self._all)

    @contextmanager
    def attach(self, route: Route) -> Iterator[CallLog]:
        with ExitStack() as stack:
            if not self._stack.routes:
                for site in self._all:
                    for name in _HOOKS:
                        stack.callback(self._watch(site, name).remove)
                stack.callback(self._pending.clear)
            yield stack.enter_context(self._stack.pushed(route))

    def _watch(self, site: Site, name: str) -> Any:
        point: nn.Module = self.model.hook_dict[f"{site.path}.{name}"]  # type: ignore[index,assignment]
        step = getattr(self, f"_on_{name.removeprefix('hook_')}")
        return point.register_forward_hook(lambda module, inputs, output: step(site, output))

    def _on_v(self, site: Site, value: Tensor) -> None:
        self._pending.setdefault(site.layer, {})["value"] = value

    def _on_attn_scores(self, site: Site, scores: Tensor) -> None:
        self._pending.setdefault(site.layer, {})["scores"] = scores

    def _on_pattern(self, site: Site, pattern: Tensor) -> Tensor | None:
        pending = self._pending.setdefault(site.layer, {})
        scores, value = pending.pop("scores", None), pending.pop("value", None)
        if scores is None or value is None:
            raise UnsupportedModelError(
                f"{site.path} fires hook_pattern out of order",
                expected="hook_v and hook_attn_scores before hook_pattern",
                got=f"scores {scores is not None}, values {value is not None}",
            )
        visible = scores > torch.finfo(scores.dtype).min / 2
        per_head = self._by_head(site, value)
        call = ScoredCall(
            site, scores, per_head, per_head, visible, site.kind == "causal", 1.0,
            sink_logit=self._sink_logit(site), native=self._native,
        )  # fmt: skip
        result = pending["result"] = self._stack.run(call)
        heads = tuple(head for edit in result.call.edits for head in edit.heads)
        if not heads:
            return None
        index = torch.tensor(heads, device=pattern.device)
        return pattern.index_copy(1, index, attention_weights(result.call)[:, index].to(pattern.dtype))

    def _on_z(self, site: Site, z: Tensor) -> Tensor | None:
        result = self._pending.get(site.layer, {}).pop("result", None)
        if result is None or not (result.replaced or result.call.edits):
            return None
        edited = [head for edit in result.call.edits for head in edit.heads]
        heads = range(site.heads) if result.replaced else edited
        # The edited pattern already gave z its weights; offsets and replaced outputs are put in here.
        by_head = z.reshape(*z.shape[:2], site.heads, -1).clone()
        by_head[:, :, list(heads)] = result.output[:, list(heads)].transpose(1, 2).to(z.dtype)
        return by_head.reshape(z.shape)

    def _sink_logit(self, site: Site) -> Tensor | None:
        # gpt-oss: the learned sink column joins after hook_attn_scores and leaves before hook_pattern.
        native = getattr(self.model.get_submodule(site.path), "original_component", None)
        return getattr(native, "sinks", None)

    def _by_head(self, site: Site, value: Tensor) -> Tensor:
        split = value if value.ndim == 4 else value.unflatten(-1, (site.kv_heads, -1))
        return split.transpose(1, 2)

    @contextmanager
    def recording(self) -> Iterator[CleanRun]:
        yield CleanRun()

    @contextmanager
    def replaying(self, run: CleanRun, layer: int, copies: int) -> Iterator[None]:
        # A hooked model runs whole: skipping blocks would skip the user's own hooks with them.
        yield

    def forward(self, inputs: Tensor, mask: Tensor | None = None, *, logits: bool = True) -> Tensor:
        arguments = {} if mask is None else {"attention_mask": mask}
        output = self.model(inputs, **arguments)
        return output if isinstance(output, Tensor) else output.logits

    def output_matrix(self, site: Site) -> Tensor:
        matrices: Any = self.model.W_O
        return matrices[site.layer].detach().float()
