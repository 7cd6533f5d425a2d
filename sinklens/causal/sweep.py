"""The exact sweep: what each variant of a model does to its next-token distribution, reusing the clean run.

Layers below a variant's first changed layer are not recomputed, and variants that start at the same layer share a
batch. ``reuse=False`` runs each variant by itself from the bottom, the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from tqdm.auto import tqdm

from sinklens.attention import AttentionCall, AttentionResult, Inner
from sinklens.backends import Backend
from sinklens.backends.protocol import CleanRun
from sinklens.measures import projected_norm
from sinklens.patch import Patch
from sinklens.prompts import PromptSet
from sinklens.verify import evaluating
from sinklens.vocabulary import Heads

LOGIT_BYTES = 256 * 2**20
"""Target size of the logits of one shared batch."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A patched model, seen as one more sequence of the batch.

    Attributes:
        name: Key in the results.
        heads: The heads it changes.
        patch: How.
    """

    name: tuple[str, ...]
    heads: Heads
    patch: Patch

    @property
    def first_layer(self) -> int:
        return min(self.patch.edits)


@dataclass(frozen=True, eq=False)
class Effects:
    """What a variant did on one batch, per token ``[sequence, query]``.

    Attributes:
        kl: ``KL(clean || variant)`` of the next-token distribution, nats.
        dloss: Change of the next-token loss, nats; 0 at the last real token, which predicts nothing.
        output_error: Squared change of the changed heads' output after W_O, given unchanged inputs.
        scale: Squared norm of the same heads' clean output, for scale.
    """

    kl: Tensor
    dloss: Tensor
    output_error: Tensor
    scale: Tensor


def sweep(
    backend: Backend,
    prompts: PromptSet,
    variants: Sequence[Variant],
    grams: dict[int, Tensor],
    *,
    batch_size: int = 2,
    reuse: bool = True,
    progress: bool = True,
) -> Iterator[tuple[slice, tuple[str, ...], Effects]]:
    """Run all variants on all prompts and yield each variant's effects, batch by batch.

    Args:
        backend: A verified backend of a causal language model.
        prompts: What to run.
        variants: What to compare with the clean run.
        grams: Gram matrices of the output projection for the layers that variants start in.
        batch_size: Sequences of the clean run.
        reuse: Skip the layers below the first change and share batches.
        progress: Show a progress bar.
    """
    ordered = sorted(variants, key=lambda variant: variant.first_layer)
    bar = tqdm(total=len(prompts) * len(variants), desc="contrast", unit="run", disable=not progress)
    with bar, evaluating(backend.model):
        for rows, tokens, mask in prompts.batches(batch_size):
            with torch.no_grad(), backend.recording() as run:
                clean = backend.forward(tokens, mask).float().log_softmax(-1)
            for chunk in _chunks(ordered, clean.numel() * 4, reuse):
                for variant, effects in _run(
                    backend, tokens, mask, prompts.mask[rows], clean, chunk, grams, run, reuse
                ):
                    yield rows, variant.name, effects
                bar.update(len(chunk) * len(tokens))


def _chunks(ordered: Sequence[Variant], logit_bytes: int, reuse: bool) -> Iterator[list[Variant]]:
    size = max(1, LOGIT_BYTES // logit_bytes) if reuse else 1
    for _, group in groupby(ordered, key=lambda variant: variant.first_layer):
        members = list(group)
        yield from (members[start : start + size] for start in range(0, len(members), size))


@torch.no_grad()
def _run(
    backend: Backend, tokens: Tensor, mask: Tensor | None, real: Tensor, clean: Tensor, chunk: list[Variant],
    grams: dict[int, Tensor], run: CleanRun, reuse: bool,
) -> list[tuple[Variant, Effects]]:  # fmt: skip
    copies = len(chunk)
    layer = chunk[0].first_layer
    route = _SideBySide(chunk, len(tokens), grams)
    many = tokens.repeat(copies, *(1,) * (tokens.ndim - 1))
    many_mask = None if mask is None else mask.repeat(copies, 1)
    with backend.attach(route), backend.replaying(run, layer if reuse else 0, copies):
        logits = backend.forward(many, many_mask)
    results = []
    for index, variant in enumerate(chunk):
        patched = logits[index * len(tokens) : (index + 1) * len(tokens)].float().log_softmax(-1)
        kl = (clean.exp() * (clean - patched)).sum(-1)
        error, scale = route.errors[index]
        results.append((variant, Effects(kl, _loss_change(clean, patched, tokens, real), error, scale)))
    return results


def _loss_change(clean: Tensor, patched: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
    change = torch.zeros(tokens.shape[:2], device=clean.device)
    target = tokens[:, 1:, None].to(clean.device)
    change[:, :-1] = (clean[:, :-1].gather(-1, target) - patched[:, :-1].gather(-1, target)).squeeze(-1)
    # A token before padding predicts nothing real.
    followed = real.roll(-1, 1)
    followed[:, -1] = False
    return change * (real & followed).to(clean.device)


@dataclass
class _SideBySide:
    """A route for a batch that holds several variants: each part of the batch gets its own edits."""

    variants: list[Variant]
    size: int
    grams: dict[int, Tensor]
    errors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult:
        layer = call.site.layer
        if not any(layer in variant.patch.edits for variant in self.variants):
            return inner(call)
        outputs = []
        plain: Tensor | None = None
        for index, variant in enumerate(self.variants):
            part = call.for_sequences(slice(index * self.size, (index + 1) * self.size))
            output = variant.patch(part, inner).output
            if layer == variant.first_layer:
                # Inputs of the first changed layer are the same for all variants: one clean result serves them.
                plain = inner(part).output if plain is None else plain
                self.errors[index] = self._error(layer, variant, output, plain)
            outputs.append(output)
        return AttentionResult(call, torch.cat(outputs))

    def _error(self, layer: int, variant: Variant, output: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        heads = list(variant.heads.by_layer()[layer])
        gram = self.grams[layer][heads]
        change = projected_norm(output[:, heads] - plain[:, heads], gram)
        size = projected_norm(plain[:, heads] - plain[:, heads].mean((0, 2), keepdim=True), gram)
        return (change**2).sum(1), (size**2).sum(1)
