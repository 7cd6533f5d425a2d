"""The attention seam: three paths that agree, heads that mix, sinks that are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sinklens as sl
from sinklens.attention import AttentionCall, Edit, attend, attention_weights, fusable
from sinklens.errors import InputError
from sinklens.normalizers import Normalizer
from sinklens.vocabulary import SinkKeys, Site
from tests.test_normalizers import ALL, name

BATCH, HEADS, LENGTH, D = 2, 4, 11, 8
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def make_call(mask: str = "none", kv_heads: int = 2, **changes: object) -> AttentionCall:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(BATCH, heads, LENGTH, D, generator=generator) * 1.5 for heads in (HEADS, kv_heads, kv_heads)
    )
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[1, :3] = False
    seen = (CAUSAL & real[:, None])[:, None]
    masks = {
        "none": None,
        "bool": seen,
        "additive": torch.where(seen, 0.0, torch.finfo(torch.float32).min),
        "window": (seen & ~CAUSAL.tril(-4)),
    }
    site = Site(0, "layer", "causal", HEADS, kv_heads)
    return replace(AttentionCall(site, query, key, value, masks[mask], True, D**-0.5), **changes)


@pytest.mark.parametrize("normalizer", ALL, ids=name)
@pytest.mark.parametrize("mask", ["none", "bool", "additive", "window"])
@pytest.mark.parametrize("learned", [False, True])
def test_three_paths_agree(normalizer: Normalizer, mask: str, learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinklens.attention.BLOCK_BYTES", 4 * BATCH * HEADS * LENGTH * 3)
    sink_logit = torch.linspace(-1, 1, HEADS) if learned else None
    for keys in (SinkKeys(), SinkKeys(first=2, learned=False), SinkKeys.at(3)):
        call = make_call(mask, sink_logit=sink_logit).edited(Edit((1, 3), normalizer, keys))
        oracle = attend(call, "reference").output
        assert not oracle.isnan().any()
        for path in ("auto", "blocked"):
            torch.testing.assert_close(attend(call, path).output, oracle, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "changes", [{"softcap": 2.0}, {"bias": torch.linspace(-2, 2, LENGTH).expand(1, HEADS, LENGTH, LENGTH)}]
)
def test_soft_cap_and_position_bias(kv_heads: int, changes: dict[str, object]) -> None:
    call = make_call("bool", kv_heads, **changes).edited(Edit((0,), sl.DropSink()))
    torch.testing.assert_close(attend(call).output, attend(call, "reference").output, atol=1e-5, rtol=1e-4)
    assert fusable(call) == ("softcap" not in changes)


def test_reference_is_textbook_attention() -> None:
    call = make_call("none", 4)
    scores = call.query @ call.key.transpose(-1, -2) * call.scale
    expected = scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ call.value
    torch.testing.assert_close(attend(call, "reference").output, expected, atol=1e-5, rtol=1e-5)


def test_the_inner_edit_wins_and_the_rest_is_untouched() -> None:
    call = make_call()
    edited = call.edited(Edit((0,), sl.Constant())).edited(Edit((0, 1), sl.DropSink()))
    assert [edit.heads for edit in edited.edits] == [(0,), (1,)]
    output = attend(edited).output
    assert not output[:, 0].any()
    assert torch.equal(output[:, 2:], attend(call).output[:, 2:])


def test_dropping_the_sink_at_query_0_gives_zero() -> None:
    """Trial case 12: no NaN, no future mass."""
    for normalizer in (sl.DropSink(), sl.RenormalizeWithoutSink()):
        for path in ("fused", "blocked"):
            output = attend(make_call().edited(Edit((0, 1, 2, 3), normalizer)), path).output
            assert float(output[:, :, 0].abs().max()) < 1e-6  # the closed form subtracts equal numbers
            assert not output.isnan().any()
    weights = attention_weights(make_call().edited(Edit((0, 1, 2, 3), sl.RenormalizeWithoutSink())))
    assert not weights.triu(1).any()


def test_a_key_value_cache_gives_the_rows_of_the_whole() -> None:
    whole = make_call("bool")
    rows = slice(8, LENGTH)
    for normalizer in ALL:
        edit = Edit((0, 2), normalizer)
        part = replace(whole, query=whole.query[:, :, rows], mask=whole.mask[:, :, rows]).edited(edit)
        torch.testing.assert_close(
            attend(part).output, attend(whole.edited(edit)).output[:, :, rows], atol=1e-5, rtol=1e-4
        )


def test_the_first_visible_token_is_found_behind_padding_and_beyond_a_rolling_cache() -> None:
    positions, exists = make_call("bool").sink_positions(SinkKeys())
    assert positions.flatten().tolist() == [0, 3]
    assert bool(exists.all())
    # The last query stands at position 10 and 7 of its sequence; the cache holds the last 9 keys.
    tail = make_call("bool")
    tail = replace(
        tail, query=tail.query[:, :, -1:], key=tail.key[:, :, 2:], value=tail.value[:, :, 2:], mask=None, rolling=True,
        last_position=torch.tensor([10, 7]),
    )  # fmt: skip
    positions, exists = tail.sink_positions(SinkKeys())
    assert exists.flatten().tolist() == [False, True]
    assert positions[1].item() == 1


def test_paths_that_cannot_serve_refuse() -> None:
    with pytest.raises(InputError, match="this call has no fused path"):
        attend(make_call(softcap=1.0), "fused")
    with pytest.raises(InputError, match="this normalizer has no fused path"):
        attend(make_call().edited(Edit((0,), sl.ReLU())), "fused")
    with pytest.raises(InputError, match="sink positions belong to sequences: expected 2 rows, got 3"):
        make_call().sink_positions(SinkKeys(positions=torch.zeros(3, 1, dtype=torch.long)))


def test_gradients_flow_through_an_edited_call() -> None:
    call = make_call()
    query = call.query.clone().requires_grad_()
    attend(replace(call, query=query).edited(Edit((0,), sl.ReLU()))).output.sum().backward()
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())


def test_low_precision_stays_close() -> None:
    call = make_call("bool")
    low = replace(call, **{name: getattr(call, name).bfloat16() for name in ("query", "key", "value")})
    edit = Edit((0,), sl.DropSink())
    output = attend(low.edited(edit)).output
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), attend(call.edited(edit)).output, atol=0.06, rtol=0.05)
