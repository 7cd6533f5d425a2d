"""The exact sweep: what each variant of a model does to its next-token distribution, reusing the clean run.

Layers below a variant's first changed layer are not recomputed, and variants that start at the same layer share a
batch. ``reuse=False`` runs each variant by itself from the bottom, the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor
from tqdm.auto import tqdm

from sinklens.attention import AttentionCall, AttentionResult, Inner
from sinklens.backends import Backend
from sinklens.backends.protocol import CleanRun
from sinklens.causal.interventions import Alter
from sinklens.measures import projected_norm
from sinklens.observe import mass_on
from sinklens.patch import Patch
from sinklens.prompts import PromptSet
from sinklens.verify import evaluating
from sinklens.vocabulary import Heads

LOGIT_BYTES = 256 * 2**20
"""Target size of the logits of one shared batch."""

_ROWS = 16


@dataclass(frozen=True, eq=False)
class Variant:
    """A patched model, seen as one more sequence of the batch.

    Attributes:
        name: Key in the results.
        heads: The heads it changes.
        patch: How.
        alter: What is done to the changed output afterwards.
        where: At which tokens ``[sequence, query]``; everywhere by default.
    """

    name: tuple[str, ...]
    heads: Heads
    patch: Patch
    alter: Alter | None = None
    where: Tensor | None = None

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


Outcome: TypeAlias = "tuple[Variant, Effects]"


def sweep(
    backend: Backend,
    prompts: PromptSet,
    variants: Sequence[Variant],
    grams: dict[int, Tensor],
    *,
    batch_size: int = 2,
    reuse: bool = True,
    progress: bool = True,
    done: Callable[[slice, Sequence[Variant]], bool] = lambda rows, chunk: False,
) -> Iterator[tuple[slice, list[Outcome]]]:
    """Run all variants on all prompts and yield the effects of those that shared a batch together.

    Args:
        backend: A verified backend of a causal language model.
        prompts: What to run.
        variants: What to compare with the clean run.
        grams: Gram matrices of the output projection for the layers that variants start in.
        batch_size: Sequences of the clean run.
        reuse: Skip the layers below the first change and share batches.
        progress: Show a progress bar.
        done: Says which parts an earlier run has finished; they are skipped. Parts are the same in every run.
    """
    ordered = sorted(variants, key=lambda variant: variant.first_layer)
    vocabulary = _vocabulary(backend)
    bar = tqdm(total=len(prompts) * len(variants), desc="contrast", unit="run", disable=not progress)
    with bar, evaluating(backend.model):
        for rows, tokens, mask in prompts.batches(batch_size):
            chunks = list(_chunks(ordered, 4 * tokens.shape[0] * tokens.shape[1] * vocabulary, reuse))
            open_chunks = [chunk for chunk in chunks if not done(rows, chunk)]
            bar.update(len(tokens) * (len(variants) - sum(map(len, open_chunks))))
            if not open_chunks:
                continue
            with torch.no_grad(), backend.recording() as run:
                logs = backend.forward(tokens, mask).float().log_softmax(-1)
                clean = (logs, logs.exp())
            for chunk in open_chunks:
                yield rows, _run(backend, rows, tokens, mask, prompts.mask[rows], clean, chunk, grams, run, reuse)
                bar.update(len(chunk) * len(tokens))


def _vocabulary(backend: Backend) -> int:
    config = getattr(backend.model, "config", None) or getattr(backend.model, "cfg", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return int(getattr(text, "vocab_size", 0) or getattr(text, "d_vocab", 0) or 1)


def _chunks(ordered: Sequence[Variant], logit_bytes: int, reuse: bool) -> Iterator[list[Variant]]:
    size = max(1, LOGIT_BYTES // logit_bytes) if reuse else 1
    for _, group in groupby(ordered, key=lambda variant: variant.first_layer):
        members = list(group)
        yield from (members[start : start + size] for start in range(0, len(members), size))


@torch.no_grad()
def _run(
    backend: Backend, rows: slice, tokens: Tensor, mask: Tensor | None, real: Tensor, clean: tuple[Tensor, Tensor],
    chunk: list[Variant], grams: dict[int, Tensor], run: CleanRun, reuse: bool,
) -> list[Outcome]:  # fmt: skip
    copies, (logs, probability) = len(chunk), clean
    layer = chunk[0].first_layer
    route = _SideBySide(chunk, rows, len(tokens), grams)
    many = tokens.repeat(copies, *(1,) * (tokens.ndim - 1))
    many_mask = None if mask is None else mask.repeat(copies, 1)
    with backend.attach(route), backend.replaying(run, layer if reuse else 0, copies):
        logits = backend.forward(many, many_mask)
    results = []
    for index, variant in enumerate(chunk):
        patched = logits[index * len(tokens) : (index + 1) * len(tokens)]
        kl, dloss = _compared(logs, probability, patched, tokens, real)
        results.append((variant, Effects(kl, dloss, *route.errors[index])))
    return results


def _compared(
    clean: Tensor, probability: Tensor, logits: Tensor, tokens: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """KL divergence and change of the next-token loss at every token, ``[sequence, query]``."""
    kl, change = torch.zeros(2, *clean.shape[:2], device=clean.device)
    target = torch.zeros_like(tokens)
    target[:, :-1] = tokens[:, 1:]
    target = target.to(clean.device)[..., None]
    # A few rows at a time: on a processor, tensors of the whole vocabulary leave its cache and are slow to allocate.
    size = _ROWS if clean.device.type == "cpu" else clean.shape[1]
    for sequence in range(len(clean)):
        for start in range(0, clean.shape[1], size):
            here = (sequence, slice(start, start + size))
            patched = logits[here].float().log_softmax(-1)
            gained = clean[here] - patched
            change[here] = gained.gather(-1, target[here]).squeeze(-1)
            kl[here] = gained.mul_(probability[here]).sum(-1)
    # A token before padding predicts nothing real, nor does the last one.
    followed = real.roll(-1, 1)
    followed[:, -1] = False
    return kl, change * (real & followed).to(clean.device)


@dataclass
class _SideBySide:
    """A route for a batch that holds several variants: each part of the batch gets its own edits."""

    variants: list[Variant]
    rows: slice
    size: int
    grams: dict[int, Tensor]
    errors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult:
        layer = call.site.layer
        if not any(layer in variant.patch.edits for variant in self.variants):
            return inner(call)
        outputs = []
        shared: AttentionResult | None = None
        for index, variant in enumerate(self.variants):
            part = call.for_sequences(slice(index * self.size, (index + 1) * self.size))
            output = variant.patch(part, inner).output
            first = layer == variant.first_layer
            if first or (layer in variant.patch.edits and (variant.alter or variant.where is not None)):
                # Inputs of the first changed layer are the same for all variants: one clean result serves them.
                plain = shared if first and shared is not None else inner(part)
                shared = plain if first else shared
                output = self._altered(layer, variant, output, plain)
                if first:
                    self.errors[index] = self._error(layer, variant, output, plain.output)
            outputs.append(output)
        return AttentionResult(call, torch.cat(outputs))

    def _altered(self, layer: int, variant: Variant, output: Tensor, plain: AttentionResult) -> Tensor:
        if variant.alter is not None:
            heads = list(variant.heads.by_layer()[layer])
            mass = mass_on(plain, variant.patch.edits[layer][0].sink_keys).sum(-1)[:, heads]
            index = torch.tensor(heads, device=output.device)
            altered = variant.alter(plain.output[:, heads], output[:, heads], mass)
            output = output.index_copy(1, index, altered.to(output.dtype))
        if variant.where is not None:
            there = variant.where[self.rows].to(output.device)[:, None, :, None]
            output = torch.where(there, output, plain.output)
        return output

    def _error(self, layer: int, variant: Variant, output: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        heads = list(variant.heads.by_layer()[layer])
        gram = self.grams[layer][heads]
        change = projected_norm(output[:, heads] - plain[:, heads], gram)
        size = projected_norm(plain[:, heads] - plain[:, heads].mean((0, 2), keepdim=True), gram)
        return (change**2).sum(1), (size**2).sum(1)
