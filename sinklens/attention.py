"""The one attention computation, as a seam that can be watched and changed.

A backend turns each attention call of a model into an :class:`AttentionCall` and hands it to a :class:`Route`. A route
passes it on to ``inner`` (watching), passes on an edited call (patching), or replaces the result. At the end of the
chain stands :func:`attend`, which evaluates the call along one of three paths that agree:

- ``reference``: the full weight matrix, the oracle of the tests;
- ``blocked``: any normalizer, a block of queries at a time, memory O(heads x block x keys);
- ``fused``: the softmax family in closed form on the output and log-sum-exp of a fused kernel, memory O(queries).

Not here: finding a model's attention (``backends``), numbers per head (``measures``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from sinklens.errors import InputError
from sinklens.normalizers import Normalizer, Softmax
from sinklens.vocabulary import SinkKeys, Site

Path = Literal["auto", "fused", "blocked", "reference"]
Rows: TypeAlias = "slice | Tensor"
"""Which queries: a slice, or their indices."""

BLOCK_BYTES = 64 * 2**20
"""Target size of one block of scores on the blocked path."""

_PLAIN = Softmax()


@dataclass(frozen=True)
class Edit:
    """Some heads of one site on another normalizer.

    Attributes:
        heads: Query heads of the site.
        normalizer: What they run on.
        sink_keys: Which keys the normalizer treats as the sink.
    """

    heads: tuple[int, ...]
    normalizer: Normalizer
    sink_keys: SinkKeys = SinkKeys()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Everything one attention computation needs, and which of its heads are edited.

    Attributes:
        site: Where in the model this is.
        query: ``[batch, head, query, d_head]``.
        key: ``[batch, kv_head, key, d_head]``.
        value: ``[batch, kv_head, key, d_value]``.
        mask: Boolean (True = visible) or additive, broadcastable to ``[batch, head, query, key]``, or None.
        causal: With no mask and more than one query: query i sees keys 0..i.
        scale: Factor on the scores.
        softcap: ``softcap * tanh(score / softcap)``, if the model caps its scores.
        bias: Additive position bias, broadcastable to the scores.
        sink_logit: The model's learned sink logits, ``[head]``: one virtual key of value 0 a head.
        last_position: Position of the last query in its own sequence, ``[batch]``, where the model tells it; needed to
            know whether the sink is still inside a rolling key/value cache.
        rolling: The keys may be the tail of a longer sequence (a sliding-window cache).
        native: The model's own normalizer, softmax for every pretrained model.
        edits: Heads that do not run on the native normalizer; disjoint.
    """

    site: Site
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    sink_logit: Tensor | None = None
    last_position: Tensor | None = None
    rolling: bool = False
    native: Normalizer = _PLAIN
    edits: tuple[Edit, ...] = ()

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def queries(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    def edited(self, edit: Edit) -> AttentionCall:
        """Add an edit; heads that are edited already keep their edit, so the innermost patch wins."""
        taken = {head for earlier in self.edits for head in earlier.heads}
        heads = tuple(head for head in edit.heads if head not in taken)
        return replace(self, edits=(*self.edits, replace(edit, heads=heads))) if heads else self

    def scores(self, rows: Rows = slice(None)) -> Tensor:
        """Scaled, capped and biased scores of some queries, ``[batch, head, rows, key]``, float32, not masked."""
        groups = self.key.shape[1]
        query = rearrange(self.query[:, :, rows].float(), "b (g h) q d -> b g h q d", g=groups)
        scores = einsum(query, self.key.float(), "b g h q d, b g k d -> b g h q k") * self.scale
        scores = rearrange(scores, "b g h q k -> b (g h) q k")
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        for extra in (self.bias, self.mask if self._additive else None):
            if extra is not None:
                scores = scores + _rows_of(extra, rows).float()
        return scores

    def visible(self, rows: Rows = slice(None)) -> Tensor:
        """Which keys some queries may see, bool, broadcastable to ``[batch, head, rows, key]``."""
        if self.mask is not None:
            mask = _rows_of(self.mask, rows)
            return mask > torch.finfo(mask.dtype).min / 2 if self._additive else mask.bool()
        keys = torch.arange(self.keys, device=self.query.device)
        if self.causal and self.queries > 1:
            queries = torch.arange(self.queries, device=self.query.device)[rows]
            return (keys <= queries[:, None])[None, None]
        return torch.ones(1, 1, 1, self.keys, dtype=torch.bool, device=self.query.device)

    @property
    def _additive(self) -> bool:
        return self.mask is not None and self.mask.dtype.is_floating_point

    def mix(self, weights: Tensor) -> Tensor:
        """Weighted sum of the values, ``[batch, head, rows, d_value]``, float32."""
        weights = rearrange(weights, "b (g h) q k -> b g h q k", g=self.value.shape[1])
        return rearrange(
            einsum(weights, self.value.float(), "b g h q k, b g k d -> b g h q d"), "b g h q d -> b (g h) q d"
        )

    def for_heads(self, heads: tuple[int, ...]) -> AttentionCall:
        """The same call on some of its heads, with one kv head each."""
        index = torch.tensor(heads, device=self.query.device)
        kv = index // (self.heads // self.key.shape[1])

        def pick(tensor: Tensor | None) -> Tensor | None:
            per_head = tensor is not None and tensor.ndim == 4 and tensor.shape[1] == self.heads > 1
            return tensor[:, index] if tensor is not None and per_head else tensor

        return replace(
            self,
            query=self.query[:, index],
            key=self.key[:, kv],
            value=self.value[:, kv],
            mask=pick(self.mask),
            bias=pick(self.bias),
            sink_logit=None if self.sink_logit is None else self.sink_logit[index],
            edits=(),
        )

    def for_sequences(self, rows: slice) -> AttentionCall:
        """The same call on some sequences of its batch."""

        def pick(tensor: Tensor | None) -> Tensor | None:
            return tensor[rows] if tensor is not None and tensor.shape[0] == self.batch > 1 else tensor

        return replace(
            self,
            query=self.query[rows],
            key=self.key[rows],
            value=self.value[rows],
            mask=pick(self.mask),
            bias=pick(self.bias),
            last_position=pick(self.last_position),
        )

    def sink_positions(self, sink_keys: SinkKeys) -> tuple[Tensor, Tensor]:
        """Key indices of the sink, ``[batch, head or 1, n]``, and which of them exist in this call's keys."""
        device = self.query.device
        if sink_keys.positions is None:
            offsets = torch.arange(sink_keys.first, device=device)
        else:
            given = sink_keys.positions.to(device)
            if given.ndim > 1 and given.shape[0] not in (1, self.batch):
                raise InputError(
                    "sink positions belong to sequences", expected=f"{self.batch} rows", got=given.shape[0]
                )
            offsets = given[:, None] if given.ndim == 2 else given
        positions = (self._first_key()[:, None, None] + offsets).expand(self.batch, -1, -1)
        exists = (positions >= 0) & (positions < self.keys)
        return positions.clamp(0, self.keys - 1), exists

    def _first_key(self) -> Tensor:
        """Index of each sequence's first real token among the keys, ``[batch]``; negative if it has rolled out."""
        if self.rolling and self.queries < self.keys and self.last_position is not None:
            # The first token of a sequence has position 0, so it stands `last_position` keys before the last one.
            return (self.keys - 1 - self.last_position.to(self.query.device)).expand(self.batch)
        if self.mask is None:
            return torch.zeros(self.batch, dtype=torch.long, device=self.query.device)
        seen = self.visible().any(dim=2).any(dim=1)
        return seen.int().argmax(-1).expand(self.batch)

    def sink_mask(self, sink_keys: SinkKeys) -> Tensor:
        """The sink as a boolean row mask, ``[batch, head or 1, 1, key]``."""
        positions, exists = self.sink_positions(sink_keys)
        mask = torch.zeros(*positions.shape[:2], self.keys, dtype=torch.int32, device=positions.device)
        return mask.scatter_add_(-1, positions, exists.int()).bool()[:, :, None]


def _rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    return tensor[:, :, rows] if tensor.shape[2] > 1 else tensor


@dataclass(frozen=True, eq=False)
class AttentionResult:
    """What an attention call gave.

    Attributes:
        call: The call as it was evaluated, edits included.
        output: Head outputs before the output projection, ``[batch, head, query, d_value]``.
        plain: The plain-softmax view of the call, if the fused path made one.
        replaced: Whether a route put the output there, so that it is not what ``call`` evaluates to.
    """

    call: AttentionCall
    output: Tensor
    plain: FusedView | None = field(default=None, repr=False)
    replaced: bool = False

    def weights(self, rows: Rows = slice(None)) -> Tensor:
        """The weights really used by some queries, ``[batch, head, rows, key]``, float32, virtual key left out."""
        return attention_weights(self.call, rows)


Inner: TypeAlias = Callable[[AttentionCall], AttentionResult]


class Route(Protocol):
    """What stands between a model and its attention.

    Watching: ``result = inner(call)``, look, return it. Patching: ``return inner(call.edited(...))``.
    """

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult: ...


def attend(call: AttentionCall, path: Path = "auto") -> AttentionResult:
    """Evaluate an attention call: ``output = weights(scores) @ value`` for every head on its own normalizer.

    Args:
        call: The call; its edited heads run on their edits, all others on the native normalizer.
        path: Which path to take; ``auto`` takes the fused one where the call allows it.

    Raises:
        InputError: ``fused`` was demanded for a call or normalizer that has no closed form.
    """
    if path == "reference":
        return AttentionResult(call, _by_rows(call, call.queries))
    view = FusedView(call) if path != "blocked" and fusable(call) else None
    if view is None and path == "fused":
        raise InputError("this call has no fused path", expected="see fusable()", got=call.site.path)
    everything = tuple(range(call.heads))
    if view is None:
        return AttentionResult(call, _by_rows(call, _block_rows(call)))
    output = view.output
    for edit in call.edits:
        part = call.for_heads(edit.heads)
        closed = edit.normalizer.closed_form(view.part(part, edit))
        if closed is None:
            if path == "fused":
                raise InputError("this normalizer has no fused path", expected="a softmax edit", got=edit.normalizer)
            whole = replace(part, edits=(replace(edit, heads=tuple(range(part.heads))),))
            closed = _by_rows(whole, _block_rows(whole))
        elif edit.normalizer.offset is not None:
            closed = closed + edit.normalizer.offset.to(closed)
        if edit.heads == everything:
            output = closed.to(output.dtype)
        else:
            output = output.index_copy(1, torch.tensor(edit.heads, device=output.device), closed.to(output.dtype))
    return AttentionResult(call, output, view)


def attention_weights(call: AttentionCall, rows: Rows = slice(None)) -> Tensor:
    """The weights of some queries under the call's edits, ``[batch, head, rows, key]``; the virtual key is left out."""
    scores, visible = call.scores(rows), call.visible(rows)
    if len(call.edits) == 1 and call.edits[0].heads == tuple(range(call.heads)):
        # Nothing of the native weights would be left.
        return _normalized(call, call.edits[0].normalizer, call.edits[0].sink_keys, scores, visible)
    weights = _normalized(call, call.native, SinkKeys(), scores, visible)
    for edit in call.edits:
        index = torch.tensor(edit.heads, device=scores.device)
        part = call.for_heads(edit.heads)
        seen = visible[:, index] if visible.shape[1] > 1 else visible
        weights = weights.index_copy(
            1, index, _normalized(part, edit.normalizer, edit.sink_keys, scores[:, index], seen)
        )
    return weights


def _normalized(
    call: AttentionCall, normalizer: Normalizer, sink_keys: SinkKeys, scores: Tensor, visible: Tensor
) -> Tensor:
    sinks = call.sink_mask(sink_keys)
    if call.sink_logit is None or not normalizer.uses_learned_sink:
        return normalizer.weights(scores, visible, sinks)
    column = repeat(call.sink_logit.float(), "h -> b h q 1", b=scores.shape[0], q=scores.shape[2])
    visible = torch.cat([visible.expand(*visible.shape[:3], call.keys), visible.new_ones(*visible.shape[:3], 1)], -1)
    sinks = torch.cat([sinks, sinks.new_full((*sinks.shape[:3], 1), sink_keys.learned)], -1)
    return normalizer.weights(torch.cat([scores, column], -1), visible, sinks)[..., :-1]


def _block_rows(call: AttentionCall) -> int:
    return max(1, BLOCK_BYTES // max(1, 4 * call.batch * call.heads * call.keys))


def row_blocks(call: AttentionCall) -> Iterator[slice]:
    """Query blocks whose scores take about :data:`BLOCK_BYTES`."""
    size = _block_rows(call)
    return (slice(start, min(start + size, call.queries)) for start in range(0, call.queries, size))


def _by_rows(call: AttentionCall, size: int) -> Tensor:
    blocks = [
        call.mix(attention_weights(call, slice(start, start + size))).to(call.value.dtype)
        for start in range(0, call.queries, size)
    ]
    output = torch.cat(blocks, 2)
    for edit in call.edits:
        if edit.normalizer.offset is not None:
            shift = torch.zeros(call.heads, 1, output.shape[-1], dtype=output.dtype, device=output.device)
            shift[list(edit.heads)] = edit.normalizer.offset.to(output)
            output = output + shift
    return output


def fusable(call: AttentionCall) -> bool:
    """Whether the fused CPU kernel serves this call exactly; everything else takes the blocked path."""
    tensors = (call.query, call.key, call.value)
    return (
        type(call) is AttentionCall
        and isinstance(call.native, Softmax)
        and call.query.device.type == "cpu"
        and call.softcap is None
        and call.value.shape[-1] == call.query.shape[-1]
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


@dataclass(frozen=True, eq=False)
class FusedView:
    """The plain-softmax attention of a call, from one fused kernel; see :class:`sinklens.normalizers.base.SoftmaxView`.

    Attributes:
        call: The call.
        sink_keys: Which keys the sink properties speak of.
        known: Output and log-sum-exp where they are known already.
    """

    call: AttentionCall
    sink_keys: SinkKeys = SinkKeys()
    known: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def part(self, call: AttentionCall, edit: Edit) -> FusedView:
        """The view of an edit's heads, sharing what has been computed."""
        heads = list(edit.heads)
        return FusedView(call, edit.sink_keys, (self._softmax[0][:, heads], self._softmax[1][:, heads]))

    @cached_property
    def _softmax(self) -> tuple[Tensor, Tensor]:
        return self.known or flash(self.call, None)

    @property
    def lse(self) -> Tensor:
        return self._softmax[1]

    @property
    def total(self) -> Tensor:
        """Log of the full denominator, learned sink included, ``[batch, head, query]``."""
        return self.lse if self.sink_logit is None else torch.logaddexp(self.lse, self.sink_logit)

    @property
    def sink_logit(self) -> Tensor | None:
        return None if self.call.sink_logit is None else self.call.sink_logit.float()[:, None]

    @property
    def output(self) -> Tensor:
        output, lse = self._softmax
        if self.sink_logit is None:
            return output
        # The learned sink is a key of value 0: it only scales the row.
        return output * torch.sigmoid(lse - self.sink_logit)[..., None].to(output.dtype)

    @cached_property
    def mass(self) -> Tensor:
        """Mass on each sink key, ``[batch, head, query, n]``: ``exp(q.k_j scale + bias - total)``, exact."""
        return key_mass(self.call, self.total, self.sink_keys)

    @property
    def sink_output(self) -> Tensor:
        positions, _ = self.call.sink_positions(self.sink_keys)
        values = gather_keys(self.call.value, positions, self.call.heads).float()
        return einsum(self.mass, values, "b h q n, b h n d -> b h q d").to(self.call.value.dtype)

    @property
    def without_sink(self) -> Tensor:
        output, lse = flash(self.call, ~self.call.sink_mask(self.sink_keys))
        if self.sink_logit is None or self.sink_keys.learned:
            return output
        return output * torch.sigmoid(lse - self.sink_logit)[..., None].to(output.dtype)


def gather_keys(per_key: Tensor, positions: Tensor, heads: int) -> Tensor:
    """Pick keys or values ``[batch, kv_head, key, d]`` at ``[batch, head or 1, n]`` -> ``[batch, head, n, d]``."""
    batch = torch.arange(per_key.shape[0], device=per_key.device)[:, None, None]
    kv = torch.arange(heads, device=per_key.device)[:, None] // (heads // per_key.shape[1])
    return per_key[batch, kv, positions.expand(-1, heads, -1)]


def key_mass(call: AttentionCall, total: Tensor, sink_keys: SinkKeys) -> Tensor:
    """Softmax mass on chosen keys without the rows: ``exp(score - total)``, 0 where the key is not visible.

    Args:
        call: The attention call.
        total: Log of each row's denominator, ``[batch, head, query]``.
        sink_keys: Which keys.

    Returns:
        ``[batch, head, query, n]``, float32.
    """
    positions, exists = call.sink_positions(sink_keys)
    keys = gather_keys(call.key, positions, call.heads).float()
    scores = einsum(call.query.float(), keys, "b h q d, b h n d -> b h q n") * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    for extra in (call.bias, call.mask if call._additive else None):
        if extra is not None:
            scores = scores + _columns(extra, positions, call)
    seen = exists[:, :, None] & _visible_columns(call, positions)
    return (scores - total[..., None]).exp().masked_fill(~seen, 0.0)


def _columns(per_pair: Tensor, positions: Tensor, call: AttentionCall) -> Tensor:
    """Columns of a ``[batch, head, query, key]`` tensor at chosen keys, ``[batch, head or 1, query, n]``."""
    heads = max(positions.shape[1], per_pair.shape[1])
    wide = per_pair.expand(call.batch, heads, per_pair.shape[2], call.keys)
    index = repeat(positions.expand(-1, heads, -1), "b h n -> b h q n", q=wide.shape[2])
    return wide.gather(-1, index)


def _visible_columns(call: AttentionCall, positions: Tensor) -> Tensor:
    if call.mask is None:
        if not (call.causal and call.queries > 1):
            return torch.ones_like(positions, dtype=torch.bool)[:, :, None]
        queries = torch.arange(call.queries, device=positions.device)
        return positions[:, :, None] <= queries[:, None]
    columns = _columns(call.mask, positions, call)
    return columns > torch.finfo(columns.dtype).min / 2 if call._additive else columns.bool()


def flash(call: AttentionCall, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax output and log-sum-exp from the CPU flash kernel that ``scaled_dot_product_attention`` itself uses.

    Args:
        call: A :func:`fusable` call; its learned sink is not part of this.
        allowed: Keys to keep, ``[batch, head or 1, 1, key]``, or None for all.

    Returns:
        Output in the model's dtype and log-sum-exp in float32; a row with nothing visible gives 0 and -inf.
    """
    dtype = call.query.dtype
    key, value = call.key, call.value
    top_left = call.mask is None and call.causal and call.queries > 1
    if top_left and call.bias is None and allowed is None:
        key, value = key[:, :, : call.queries], value[:, :, : call.queries]
        return _kernel(call.query, key, value, None, True, call.scale)
    if call.mask is None and call.bias is None and allowed is None:
        return _kernel(call.query, key, value, None, False, call.scale)
    visible = call.visible() if allowed is None else call.visible() & allowed
    additive = torch.zeros((), dtype=dtype, device=call.query.device)
    for extra in (call.bias, call.mask if call._additive else None):
        additive = additive if extra is None else additive + extra.to(dtype)
    shape = (call.batch, max(visible.shape[1], additive.shape[1] if additive.ndim else 1), call.queries, call.keys)
    mask = torch.where(visible, additive, -torch.inf).expand(shape)
    output, lse = _kernel(call.query, key, value, mask, False, call.scale)
    # The kernel reports 0, not -inf, for a row that sees nothing.
    return output, lse.masked_fill(~visible.any(-1), -torch.inf)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    # The kernel promises a stride of 1 on the last axis of whatever it is given only if we do.
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, lse.float()
