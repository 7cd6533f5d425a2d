"""Watch attention: one streamed pass that records, per token and head, how much lies on the sink and what is written.

Patterns are never kept. The mass on a few keys comes exactly from the fused kernel's log-sum-exp; where the sink is,
entropy and row sums come from a sample of query rows, exact on those rows.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import einsum
from torch import Tensor
from tqdm.auto import tqdm

from sinklens.attention import (
    AttentionCall,
    AttentionResult,
    FusedView,
    Inner,
    gather_keys,
    row_blocks,
)
from sinklens.backends import Backend
from sinklens.errors import InputError, MemoryLimitError, PatchNotAppliedError
from sinklens.measures import entropy, gram, locate_sink, projected_norm
from sinklens.prompts import PromptSet
from sinklens.verify import evaluating, verified
from sinklens.vocabulary import Head, Heads, HeadsLike, SinkKeys, Site

SAMPLED_ROWS = 32
"""Query rows a sequence from which the sink's place, entropy and row sums are read."""

DISK_FROM = 2**30
"""Bytes of a recording from which its arrays lie in temporary files instead of memory."""

_FIRST_FOUR = SinkKeys(first=4)


@dataclass(frozen=True, eq=False)
class Activity:
    """What every head did at every token of a prompt set.

    Attributes:
        prompts: The prompts.
        sites: The model's attention sites.
        sink_keys: Which keys counted as the sink.
        mass: Weight on the sink, ``[layer_head, sequence, query]``, float32; 0 at padding.
        norm: Norm of the head's output after the output projection, same shape.
        uniform: Mass that uniform attention over the visible keys would put on the sink, ``[layer, sequence, query]``.
        per_sequence: Numbers per sequence, each ``[layer_head, sequence]``: ``first_four``, ``located_mass``,
            ``located_position`` (from the sequence's start), ``entropy``, ``row_sum``, ``row_sum_error``,
            ``value_norm`` (mean norm of content values after the output projection), ``value_ratio``.
    """

    prompts: PromptSet
    sites: tuple[Site, ...]
    sink_keys: SinkKeys
    mass: np.ndarray
    norm: np.ndarray
    uniform: np.ndarray
    per_sequence: Mapping[str, np.ndarray] = field(repr=False)

    @property
    def heads(self) -> Heads:
        """The heads in row order."""
        return every_head(self.sites)

    @property
    def layer_of_row(self) -> np.ndarray:
        """Index into ``uniform`` of each row."""
        return np.array([site.layer for site in self.sites for _ in range(site.heads)])

    def counted(self, skip_rows: int) -> np.ndarray:
        """Real tokens past the first ``skip_rows`` of their sequence, ``[sequence, query]``."""
        mask = self.prompts.mask.numpy()
        return mask & (mask.cumsum(-1) > skip_rows)


def every_head(sites: tuple[Site, ...]) -> Heads:
    """All heads of a model, by layer."""
    return Heads(Head(site.layer, head) for site in sites for head in range(site.heads))


def record_activity(
    model: object,
    prompts: PromptSet,
    *,
    sink_keys: SinkKeys | None = None,
    skip_rows: int = 8,
    batch_size: int = 2,
    outputs: bool = True,
    locate: bool = True,
    max_bytes: int | None = None,
    disk_from: int = DISK_FROM,
    progress: bool = True,
) -> Activity:
    """Record the sink mass and output norm of every head at every token, in one pass at the cost of a forward.

    Args:
        model: A transformers model, a TransformerBridge, or a model with TransformerLens hooks.
        prompts: What to run.
        sink_keys: Which keys count as the sink; the first visible token by default. Explicit positions may be one row
            for all sequences, or one a sequence.
        skip_rows: Rows at each sequence's start that sampled numbers leave out.
        batch_size: Sequences a forward pass.
        outputs: Also output norms and value ratios; without them those numbers are NaN.
        locate: Also where the sink is, entropy and row sums; without them those numbers are NaN.
        max_bytes: Refuse to start if :func:`estimate_bytes` exceeds this.
        disk_from: From this many bytes on, ``mass``, ``norm`` and ``uniform`` are memory-mapped temporary files, in the
            folder that ``TMPDIR`` names; they go when the recording goes.
        progress: Show a progress bar.

    Raises:
        MemoryLimitError: The estimate exceeds ``max_bytes``, or the disk has no room; nothing has run.
        InputError: The sequences are no longer than ``skip_rows``, or there are sink positions of other sequences.
        PatchNotAppliedError: An attention layer was not reached.
    """
    backend = verified(model)
    longest = int(prompts.mask.sum(-1).max())
    if longest <= skip_rows:
        raise InputError(
            f"the first {skip_rows} rows are left out", expected=f"prompts of more than {skip_rows} tokens", got=longest
        )
    keys = sink_keys or SinkKeys()
    if (given := keys.positions) is not None and given.ndim > 1 and len(given) not in (1, len(prompts)):
        raise InputError("sink positions belong to sequences", expected=f"1 or {len(prompts)} rows", got=len(given))
    needed = estimate_bytes(backend, prompts, batch_size)
    if max_bytes is not None and needed > max_bytes:
        raise MemoryLimitError(
            "the run would not fit", expected=f"at most {max_bytes:,} bytes", got=f"about {needed:,} bytes"
        )
    on_disk = _too_large_for_memory(record_bytes(backend, prompts), disk_from)
    recorder = _Recorder(backend, prompts, keys, skip_rows, outputs, locate, on_disk)
    bar = tqdm(total=len(prompts), desc="recording heads", unit="seq", disable=not progress)
    with bar, evaluating(backend.model), torch.inference_mode():
        for rows, tokens, mask in prompts.batches(batch_size):
            recorder.rows, recorder.real, recorder.keys = rows, prompts.mask[rows], keys.select(rows)
            with backend.attach(recorder) as log:
                backend.forward(tokens, mask, logits=False)
            if wrong := [site.layer for site in backend.sites if log.calls.get(site.layer) != 1]:
                raise PatchNotAppliedError(
                    "every attention layer reports once a batch", expected=f"layers {wrong} once", got=log.calls
                )
            bar.update(len(tokens))
    return recorder.activity()


def record_bytes(backend: Backend, prompts: PromptSet) -> int:
    """How large ``mass``, ``norm`` and ``uniform`` are together."""
    return 4 * prompts.mask.numel() * sum(2 * site.heads + 1 for site in backend.sites)


def estimate_bytes(backend: Backend, prompts: PromptSet, batch_size: int) -> int:
    """About how much memory a recording needs beyond the model: the record, and one batch's largest tensors.

    The record counts wherever it lies, since whatever is computed from it reads it into memory.
    """
    sequences, length = prompts.mask.shape
    heads = sum(site.heads for site in backend.sites)
    widest = max(site.heads for site in backend.sites)
    record = record_bytes(backend, prompts) + 8 * 7 * heads * sequences
    config = getattr(backend.model, "config", None) or getattr(backend.model, "cfg", None)
    width = int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0) or 1)
    inner = int(getattr(config, "intermediate_size", 0) or 4 * width)
    batch = 4 * batch_size * length * (6 * width + 3 * inner) + 4 * batch_size * widest * SAMPLED_ROWS * length * 4
    return int(record + batch)


def attention_patterns(
    model: object, prompts: PromptSet, heads: HeadsLike, *, batch_size: int = 2
) -> dict[Head, Tensor]:
    """Full attention patterns of chosen heads, ``{head: [sequence, query, key]}``, float32, on the CPU.

    The layout of TransformerLens and circuitsvis: ``cv.attention.attention_patterns(tokens, torch.stack([...]))``.
    """
    backend = verified(model)
    by_layer = Heads.of(heads).check(backend.sites).by_layer()
    kept: dict[Head, list[Tensor]] = {head: [] for head in Heads.of(heads)}

    def keep(call: AttentionCall, inner: Inner) -> AttentionResult:
        result = inner(call)
        if call.site.layer in by_layer:
            weights = result.weights().cpu()
            for head in by_layer[call.site.layer]:
                kept[Head(call.site.layer, head)].append(weights[:, head].clone())
        return result

    with evaluating(backend.model), torch.inference_mode(), backend.attach(keep):
        for _, tokens, mask in prompts.batches(batch_size):
            backend.forward(tokens, mask, logits=False)
    return {head: torch.cat(parts) for head, parts in kept.items()}


def next_token_losses(model: object, prompts: PromptSet, *, batch_size: int = 2) -> np.ndarray:
    """Loss of the token after each position, nats, ``[sequence, position]``; 0 where no real token follows.

    Raises:
        InputError: The prompts have no token ids, so there is nothing to predict.
    """
    if prompts.tokens.ndim != 2:
        raise InputError("a loss needs tokens to predict", expected="prompts of token ids", got="vectors")
    backend = verified(model)
    made = np.zeros(prompts.mask.shape)
    with evaluating(backend.model), torch.inference_mode():
        for rows, tokens, mask in prompts.batches(batch_size):
            log = backend.forward(tokens, mask)[:, :-1].float().log_softmax(-1)
            loss = -log.gather(-1, tokens[:, 1:, None].to(log.device)).squeeze(-1)
            made[rows, :-1] = (loss.cpu() * (prompts.mask[rows, 1:] & prompts.mask[rows, :-1])).numpy()
    return made


def mass_on(result: AttentionResult, sink_keys: SinkKeys) -> Tensor:
    """Weight really put on each sink key, ``[batch, head, query, n]`` (plus one column for a learned sink that counts).

    Exact from the log-sum-exp where the call ran plain softmax on the fused path; block by block otherwise.
    """
    call = result.call
    if result.plain is not None and not call.edits:
        view = FusedView(call, sink_keys, (result.plain.output, result.plain.lse))
        mass = view.mass
        learned = None if view.sink_logit is None else torch.sigmoid(view.sink_logit - view.lse)
    else:
        positions, exists = call.sink_positions(sink_keys)
        index = positions[:, :, None].expand(-1, call.heads, -1, -1)
        blocks = [result.weights(rows) for rows in row_blocks(call)]
        mass = torch.cat([w.gather(-1, index.expand(-1, -1, w.shape[2], -1)) for w in blocks], 2)
        mass = mass * exists[:, :, None]
        learned = None if call.sink_logit is None else torch.cat([1 - w.sum(-1) for w in blocks], 2)
    if learned is None or not sink_keys.learned:
        return mass
    return torch.cat([mass, learned.expand(mass.shape[:-1])[..., None]], -1)


class _Recorder:
    """The watching route behind :func:`record_activity`."""

    def __init__(self, backend: Backend, prompts: PromptSet, sink_keys: SinkKeys, skip_rows: int, outputs: bool,
                 locate: bool, on_disk: bool) -> None:  # fmt: skip
        self.locate = locate
        self.backend, self.prompts, self.sink_keys, self.skip_rows = backend, prompts, sink_keys, skip_rows
        self.sites = backend.sites
        self.first_row = dict(
            zip([s.layer for s in self.sites], np.cumsum([0, *(s.heads for s in self.sites)]), strict=False)
        )
        total, (sequences, length) = sum(site.heads for site in self.sites), prompts.mask.shape
        self.mass, self.norm, self.uniform = (
            _zeros((rows, sequences, length), on_disk) for rows in (total, total, len(self.sites))
        )
        if not outputs:
            self.norm[:] = np.nan
        names = ("first_four", "located_mass", "located_position", "entropy", "row_sum", "row_sum_error",
                 "value_norm", "value_ratio")  # fmt: skip
        self.numbers = {name: np.full((total, sequences), np.nan) for name in names}
        self.grams = {s.layer: gram(backend.output_matrix(s)) for s in self.sites} if outputs else {}
        self.rows, self.real, self.keys = slice(0), torch.zeros(0, dtype=torch.bool), sink_keys  # of the present batch

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult:
        result = inner(call)
        if call.queries != call.keys:
            raise InputError("recording needs self-attention", expected="as many keys as queries", got=call.site)
        real = self.real.to(call.query.device)
        counted = real & (real.cumsum(-1) > self.skip_rows)
        layer, start = call.site.layer, self.first_row[call.site.layer]
        heads = slice(start, start + call.site.heads)

        def put(name: str, values: Tensor) -> None:
            self.numbers[name][heads, self.rows] = values.double().cpu().numpy().T

        four = mass_on(result, _FIRST_FOUR)
        default = self.keys == SinkKeys() and call.sink_logit is None
        mass = four[..., 0] if default else mass_on(result, self.keys).sum(-1)
        self.mass[heads, self.rows] = (mass * real[:, None]).transpose(0, 1).cpu().numpy()
        put("first_four", _row_mean(four.sum(-1), counted))
        self.uniform[layer, self.rows] = _uniform_mass(call, self.keys).cpu().numpy() * real.cpu().numpy()
        if self.locate:
            self._sample(result, counted, put)
        if self.grams:
            norm = projected_norm(result.output, self.grams[layer]) * real[:, None]
            self.norm[heads, self.rows] = norm.transpose(0, 1).cpu().numpy()
            sink, others = self._value_norms(call, real)
            put("value_norm", others)
            put("value_ratio", sink / others.clamp(min=1e-30))
        return result

    def _sample(self, result: AttentionResult, counted: Tensor, put: Callable[[str, Tensor], None]) -> None:
        call = result.call
        candidates = counted.any(0).nonzero().squeeze(-1)
        picks = torch.linspace(0, len(candidates) - 1, min(SAMPLED_ROWS, len(candidates))).round().long()
        chosen = candidates[picks.to(candidates.device)]
        weights, visible = result.weights(chosen), call.visible(chosen)
        seen = visible & counted[:, None, chosen, None]
        weights = weights * counted[:, None, chosen, None]
        position, _ = locate_sink(weights, seen)
        first = call._first_key()
        located = SinkKeys(positions=(position - first[:, None])[..., None], learned=False)
        rows = counted[:, chosen]
        total = weights.sum(-1)
        put("located_position", position - first[:, None])
        put("located_mass", _row_mean(mass_on(result, located).sum(-1), counted))
        put("entropy", _row_mean(entropy(weights), rows))
        put("row_sum", _row_mean(total, rows))
        error = ((total - 1).abs() * rows[:, None]).amax(-1)
        put("row_sum_error", error)

    def _value_norms(self, call: AttentionCall, real: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of the sink's value and mean norm of up to 64 other values, both after W_O, ``[batch, head]``."""
        grams = self.grams[call.site.layer]
        spots = real.any(0).nonzero().squeeze(-1)
        picks = spots[torch.linspace(0, len(spots) - 1, min(64, len(spots))).round().long().to(spots.device)]
        positions, exists = call.sink_positions(self.keys)
        sink = projected_norm(gather_keys(call.value, positions, call.heads), grams)
        sink = (sink * exists).sum(-1) / exists.sum(-1).clamp(min=1)
        others = projected_norm(gather_keys(call.value, picks.expand(call.batch, 1, -1), call.heads), grams)
        weight = real[:, picks] & ~call.sink_mask(self.keys)[:, 0, 0, picks]
        return sink, _row_mean(others, weight)

    def activity(self) -> Activity:
        return Activity(self.prompts, self.sites, self.sink_keys, self.mass, self.norm, self.uniform, self.numbers)


def _too_large_for_memory(size: int, disk_from: int) -> bool:
    folder = tempfile.gettempdir()
    # A mapped file is filled late: without room on the disk the process would die without a word.
    if size >= disk_from and (free := shutil.disk_usage(folder).free) < size:
        raise MemoryLimitError(
            "the disk has no room for the recording", expected=f"{size:,} free bytes in {folder}", got=f"{free:,}"
        )
    return size >= disk_from


def _zeros(shape: tuple[int, ...], on_disk: bool) -> np.ndarray:
    """Float32 zeros in memory, or mapped to a temporary file that goes with the array."""
    if not on_disk:
        return np.zeros(shape, dtype=np.float32)
    with tempfile.TemporaryFile(prefix="sinklens-") as file:
        return np.memmap(file, dtype=np.float32, mode="w+", shape=shape)


def _row_mean(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of ``[batch, head, row]`` over the counted rows; NaN without any."""
    return (values * counted[:, None]).sum(-1) / counted.sum(-1, keepdim=True)


def _uniform_mass(call: AttentionCall, sink_keys: SinkKeys) -> Tensor:
    """Share of each row's visible keys that are sink keys, ``[batch, query]``; 0 where the sink is not visible."""
    sinks = call.sink_mask(sink_keys).float().mean(1)
    virtual = float(call.sink_logit is not None and sink_keys.learned)
    if call.mask is None:
        keys = torch.arange(call.keys, device=sinks.device)
        counts = (
            (keys + 1.0) if call.causal and call.queries > 1 else torch.full_like(keys, call.keys, dtype=torch.float)
        )
        hits = sinks[:, 0].cumsum(-1) if call.causal and call.queries > 1 else sinks[:, 0].sum(-1, keepdim=True)
    else:
        seen = call.visible()[:, 0].float()
        counts, hits = seen.sum(-1), einsum(seen.expand(call.batch, -1, -1), sinks[:, 0], "b q k, b k -> b q")
    return ((hits + virtual) / (counts + virtual).clamp(min=1)).expand(call.batch, call.queries)
