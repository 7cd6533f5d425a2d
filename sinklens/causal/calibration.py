"""Calibration: what the interventions take from a head, measured on sequences that the test never sees."""

from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor

from sinklens.attention import AttentionCall, AttentionResult, Inner, gather_keys
from sinklens.causal.interventions import HeadMeans
from sinklens.observe import mass_on
from sinklens.prompts import PromptSet
from sinklens.verify import evaluating, verified
from sinklens.vocabulary import Head, Heads, HeadsLike, SinkKeys


def head_means(
    model: object,
    prompts: PromptSet,
    heads: HeadsLike,
    *,
    sink_keys: SinkKeys | None = None,
    skip_rows: int = 8,
    batch_size: int = 2,
) -> dict[Head, HeadMeans]:
    """Mean sink contribution ``mean(s v_sink)`` and mean output of chosen heads, over tokens past ``skip_rows``.

    Args:
        model: A transformers model, a TransformerBridge, or a model with TransformerLens hooks.
        prompts: Calibration sequences.
        heads: Which heads.
        sink_keys: Which keys count as the sink.
        skip_rows: Rows at each sequence's start that are left out.
        batch_size: Sequences a forward pass.
    """
    backend = verified(model)
    by_layer = Heads.of(heads).check(backend.sites).by_layer()
    keys = sink_keys or SinkKeys()
    sums: dict[Head, list[Tensor]] = {}
    counted = torch.zeros(0)

    def collect(call: AttentionCall, inner: Inner) -> AttentionResult:
        result = inner(call)
        if call.site.layer in by_layer:
            positions, _ = call.sink_positions(keys)
            mass = mass_on(result, keys)[..., : positions.shape[-1]]
            values = gather_keys(call.value, positions, call.heads).float()
            weight = counted.to(mass)
            sink = einsum(mass, values, weight, "b h q n, b h n d, b q -> h d")
            output = einsum(result.output.float(), weight, "b h q d, b q -> h d")
            for head in by_layer[call.site.layer]:
                total = sums.setdefault(Head(call.site.layer, head), [torch.zeros(()), torch.zeros(())])
                total[0], total[1] = total[0] + sink[head], total[1] + output[head]
        return result

    tokens_counted = 0
    with evaluating(backend.model), torch.no_grad(), backend.attach(collect):
        for rows, tokens, mask in prompts.batches(batch_size):
            real = prompts.mask[rows]
            counted = (real & (real.cumsum(-1) > skip_rows)).float()
            tokens_counted += int(counted.sum())
            backend.forward(tokens, mask, logits=False)
    return {head: HeadMeans(sink / tokens_counted, output / tokens_counted) for head, (sink, output) in sums.items()}
