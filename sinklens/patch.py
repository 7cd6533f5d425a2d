"""Change attention: run chosen heads of a model on another normalizer, and put everything back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from sinklens.attention import AttentionCall, AttentionResult, Edit, Inner
from sinklens.errors import InputError, PatchNotAppliedError
from sinklens.normalizers import Normalizer
from sinklens.verify import verified
from sinklens.vocabulary import Head, HeadLike, Heads, HeadsLike, SinkKeys

Plan: TypeAlias = "Mapping[HeadLike, Normalizer]"


@dataclass(frozen=True)
class Patch:
    """A patching route: some heads of some layers on other normalizers.

    Attributes:
        edits: The edits of each layer.
        served: How often each layer's edits were put into a call.
    """

    edits: Mapping[int, tuple[Edit, ...]]
    served: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Mapping[Head, Normalizer], sink_keys: SinkKeys) -> Patch:
        """Group a plan by layer; heads that share a normalizer share an edit, so they run together."""
        layers: dict[int, dict[int, Edit]] = {}
        for (layer, head), normalizer in plan.items():
            shared = layers.setdefault(layer, {})
            earlier = shared.get(id(normalizer))
            shared[id(normalizer)] = Edit((*(earlier.heads if earlier else ()), head), normalizer, sink_keys)
        return cls({layer: tuple(edits.values()) for layer, edits in layers.items()})

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult:
        for edit in self.edits.get(call.site.layer, ()):
            call = call.edited(edit)
            self.served[call.site.layer] = self.served.get(call.site.layer, 0) + 1
        return inner(call)


@contextmanager
def patched(
    model: object,
    normalizer: Normalizer | Plan,
    heads: HeadsLike | None = None,
    *,
    sink_keys: SinkKeys | None = None,
    probe: Tensor | None = None,
) -> Iterator[Heads]:
    """Run chosen heads of a pretrained model on another normalizer for the time of a with-block.

    ``output_h = normalizer.weights(scores_h) @ values_h`` for the chosen heads; all others stay as they are. Works
    under ``generate`` with a key/value cache. Blocks nest: the inner one wins on heads that both name. On exit, normal
    or by exception, logits, attention implementation, hooks and training flags are exactly as before.

    Args:
        model: A transformers model, a TransformerBridge, or a model with TransformerLens hooks.
        normalizer: What the heads run on, or a mapping from head to normalizer.
        heads: Which query heads, e.g. ``[(18, 8)]`` or ``"L18H8,L20H8"``; None for every head of the model. Left out
            when a mapping is given.
        sink_keys: Which keys the normalizers treat as the sink; the first visible token by default.
        probe: Inputs for the verification pass of a model that does not take token ids.

    Yields:
        The patched heads.

    Raises:
        HeadRangeError: A head the model does not have.
        UnsupportedModelError: The model's attention cannot be changed faithfully.
        PatchNotAppliedError: The model ran inside the block and a patched layer was never reached.

    Example:
        >>> with sl.patched(model, sl.ReLU(), heads=[(18, 8)]):      # doctest: +SKIP
        ...     model.generate(**inputs)
    """
    backend = verified(model, probe)
    plan = _plan(
        normalizer, heads, Heads(Head(site.layer, head) for site in backend.sites for head in range(site.heads))
    )
    chosen = Heads.of(plan).check(backend.sites)
    patch = Patch.of(plan, sink_keys or SinkKeys())
    with backend.attach(patch) as log:
        yield chosen
    missed = sorted(layer for layer in patch.edits if log.calls and not patch.served.get(layer))
    if missed:
        raise PatchNotAppliedError(
            "the model ran but patched layers were not reached", expected=f"calls from layers {missed}", got=log.calls
        )


def _plan(normalizer: Normalizer | Plan, heads: HeadsLike | None, every: Heads) -> dict[Head, Normalizer]:
    if isinstance(normalizer, Normalizer):
        chosen = every if heads is None else Heads.of(heads)
        if not chosen:
            raise InputError("a patch needs heads", expected="at least one head", got="none")
        return dict.fromkeys(chosen, normalizer)
    if not isinstance(normalizer, Mapping) or not normalizer:
        raise InputError(
            "a patch is a normalizer or a mapping from head to normalizer", expected="e.g. ReLU()", got=repr(normalizer)
        )
    if heads is not None:
        raise InputError("a mapping names its own heads", expected="heads=None", got=repr(heads))
    return {Heads.of([head])[0]: value for head, value in normalizer.items()}
