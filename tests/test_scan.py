"""The scan: measures on attention worked out by hand, then laws on real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sinklens as sl
from sinklens.attention import AttentionCall, attend
from sinklens.errors import MemoryLimitError
from sinklens.measures import locate_sink, margin, ratio_interval, received_mass
from sinklens.scanning import summarize
from sinklens.vocabulary import Site
from tests import tiny

NUMBERS = [
    "sink_mass", "sink_rate", "uniform_mass", "boost", "located_mass", "first_four_mass", "dormant_fraction",
    "entropy", "value_ratio", "row_sum",
]  # fmt: skip


class Synthetic(torch.nn.Module):
    """A model with TransformerLens names whose single layer has the attention rows it is told to have."""

    class Config:
        n_layers, d_model, d_vocab, n_key_value_heads, attention_dir = 1, 4, 64, None, "causal"

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.cfg = self.Config()
        self.cfg.n_heads = rows.shape[0]  # type: ignore[attr-defined]
        names = ("hook_v", "hook_attn_scores", "hook_pattern", "hook_z")
        self.points = torch.nn.ModuleDict({name: torch.nn.Identity() for name in names})
        self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"attn": self.points})])
        self.hook_dict = {f"blocks.0.attn.{name}": point for name, point in self.points.items()}
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.W_O = torch.eye(4).repeat(rows.shape[0], 1, 1)[None]

    def probe(self) -> torch.Tensor:
        return tiny.tokens(1, self.rows.shape[-1])

    def run_with_hooks(self) -> None:
        raise NotImplementedError

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        rows = self.rows[:, :length, :length]
        scores = rows.log().masked_fill(rows == 0, -1e4)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, torch.finfo(torch.float32).min).expand(len(tokens), -1, -1, -1)
        value = torch.nn.functional.one_hot(tokens % 4, 4).float()[:, :, None].expand(-1, -1, self.rows.shape[0], -1)
        value = self.points["hook_v"](value)
        pattern = self.points["hook_pattern"](self.points["hook_attn_scores"](scores).softmax(-1))
        z = self.points["hook_z"](torch.einsum("bhqk,bkhd->bqhd", pattern, value))
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O[0])


def uniform(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]


def scan_rows(rows: torch.Tensor, rule: sl.SinkRule | None = None, sequences: int = 3) -> sl.SinkScan:
    prompts = sl.PromptSet.from_tokens(tiny.tokens(sequences, rows.shape[-1]))
    return sl.scan(Synthetic(rows), prompts, rule=rule, progress=False)


@pytest.mark.parametrize("length", [8, 16, 64])
def test_a_uniform_head_is_never_a_sink(length: int) -> None:
    """Trial case 7, with the numbers of Gu's own score beside ours."""
    found = scan_rows(uniform(length)[None], sl.SinkRule(skip_rows=min(8, length // 2)))
    assert found.frame.boost[0] == pytest.approx(1.0, abs=1e-5)
    assert not found.sinks(0.05)
    theirs = scan_rows(uniform(length)[None], sl.SinkRule.gu())
    alpha = float((1 / torch.arange(1, length + 1)).mean())
    assert theirs.frame.sink_mass[0] == pytest.approx(alpha, abs=1e-5)
    assert theirs.frame.sink_rate[0] == float(alpha > 0.3)
    if length == 64:
        assert alpha == pytest.approx(0.0741, abs=5e-5)


def test_identity_and_previous_token_heads_are_not_flagged() -> None:
    """Trial case 8: the last columns included."""
    previous = torch.eye(32).roll(-1, 1).tril()
    previous[0, 0] = 1
    found = scan_rows(torch.stack([torch.eye(32), previous]))
    assert not found.sinks(0.1)
    assert (found.frame.located_mass < 0.1).all()


def test_a_sink_elsewhere_is_found() -> None:
    """Trial case 9: A[i, 3] = .95 for i > 3."""
    rows = uniform(32) * 0.05
    rows[4:, 3] += 0.95
    rows = rows / rows.sum(-1, keepdim=True)
    found = scan_rows(rows[None])
    assert found.frame.sink_position[0] == 3
    assert found.frame.located_mass[0] > 0.94
    assert found.frame.sink_mass[0] < 0.05
    assert found.sinks(0.9) == sl.Heads.of("L0H0")
    assert "position 3" in found.reading()
    explicit = sl.scan(Synthetic(rows[None]), sl.PromptSet.from_tokens(tiny.tokens(3, 32)), sink_keys=sl.SinkKeys.at(3),
                       progress=False)  # fmt: skip
    assert explicit.frame.sink_mass[0] == pytest.approx(found.frame.located_mass[0], abs=1e-6)


def test_a_head_that_always_sleeps_is_dormant_and_one_with_a_loud_sink_is_not() -> None:
    rows = uniform(32) * 0.01
    rows[:, 0] += 0.99
    tokens = tiny.tokens(3, 32)
    prompts = sl.PromptSet.from_tokens(tokens)
    quiet, loud = Synthetic(rows[None]), Synthetic(rows[None])
    for model, size in ((quiet, 0.05), (loud, 1.0)):
        model.points["hook_v"].register_forward_hook(
            lambda module, args, value, size=size: torch.cat([value[:, :1] * size, value[:, 1:]], 1)
        )
    assert sl.scan(quiet, prompts, progress=False).frame.dormant_fraction[0] == 1.0
    shown = sl.scan(loud, prompts, progress=False).frame
    assert shown.dormant_fraction[0] == 0.0
    assert shown.value_ratio[0] == pytest.approx(1.0)


def test_gu_is_exact_for_every_key() -> None:
    rows = torch.rand(2, 3, 16, 16).tril()
    rows = rows / rows.sum(-1, keepdim=True)
    visible = torch.ones(16, 16, dtype=torch.bool).tril()
    by_hand = torch.stack([rows[..., k:, k].sum(-1) / (16 - k) for k in range(16)], -1)
    torch.testing.assert_close(received_mass(rows, visible), by_hand)
    assert locate_sink(rows, visible)[0].shape == (2, 3)


def test_margin_is_the_logit_of_the_mass() -> None:
    call_scores = torch.tensor([2.0, 0.5, -1.0])
    mass = call_scores.softmax(-1)[0]
    torch.testing.assert_close(margin(mass), -(call_scores[1:] - call_scores[0]).logsumexp(-1), atol=1e-5, rtol=1e-5)


class TestRealModels:
    def test_shape_ranges_and_restored_implementation(self) -> None:
        """Trial case 1."""
        model = tiny.causal()
        found = sl.scan(model, sl.PromptSet.from_tokens(tiny.tokens(1, 32)), progress=False)
        assert found.frame.shape[0] == 8
        assert np.isfinite(found.frame[NUMBERS].to_numpy()).all()
        assert found.frame[["sink_mass", "sink_rate", "located_mass"]].to_numpy().min() >= 0
        assert found.frame.max_row_sum_error.max() < 1e-5
        assert list(found.frame.kv_head[:4]) == [0, 0, 1, 1]
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3", "GPTOSS", "GPT2"])
    def test_against_the_full_matrix(self, family: str) -> None:
        """Every number of the fused route equals the one from the weights themselves."""
        model, tokens = tiny.causal(family), tiny.tokens(2, 24)
        prompts = sl.PromptSet.from_tokens(tokens)
        found = sl.scan(model, prompts, progress=False).frame
        patterns = sl.attention_patterns(model, prompts, [(layer, head) for layer in range(2) for head in range(4)])
        for row, weights in enumerate(patterns.values()):
            first = weights[:, 8:, 0]
            learned = (1 - weights[:, 8:].sum(-1)) if family == "GPTOSS" else 0.0
            assert found.sink_mass[row] == pytest.approx(float((first + learned).mean()), abs=1e-5)
            assert found.entropy[row] == pytest.approx(
                float(torch.special.entr(weights[:, 8:]).sum(-1).mean()), abs=1e-4
            )
        eager = tiny.causal(family)
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            theirs = eager(tokens, output_attentions=True, use_cache=False).attentions
        torch.testing.assert_close(patterns[sl.Head(1, 2)], theirs[1][:, 2], atol=1e-5, rtol=1e-4)

    def test_padding_and_pad_ids(self) -> None:
        """Trial cases 5 and 6: lengths 16 and 13, padded left and right, any pad id."""
        model = tiny.causal()
        long, short = tiny.tokens(1, 16, seed=1), tiny.tokens(1, 13, seed=2)
        singles = [sl.scan(model, sl.PromptSet.from_tokens(t), progress=False).frame[NUMBERS] for t in (long, short)]
        expected = (singles[0] + singles[1]) / 2
        for side in ("left", "right"):
            for pad_id in (0, 7):
                filler = torch.full((1, 3), pad_id)
                row = torch.cat([filler, short] if side == "left" else [short, filler], 1)
                mask = torch.ones(2, 16, dtype=torch.bool)
                mask[1, slice(0, 3) if side == "left" else slice(13, 16)] = False
                found = sl.scan(model, sl.PromptSet.from_tokens(torch.cat([long, row]), mask), progress=False)
                difference = (found.frame[NUMBERS] - expected).abs()
                assert difference.drop(columns=["boost"]).max().max() < 1e-5

    @pytest.mark.parametrize(
        "options", [{}, {"rule": sl.SinkRule.gu(0.2)}, {"sink_keys": sl.SinkKeys(first=2)}, {"outputs": False}]
    )
    def test_a_list_is_the_mean_of_its_singles(self, options: dict[str, Any]) -> None:
        """Trial case 17, for every option; the largest row-sum error is a maximum and boost a ratio of means."""
        model, tokens = tiny.causal(), tiny.tokens(4, 24)
        prompts = sl.PromptSet.from_tokens(tokens)
        together = sl.scan(model, prompts, batch_size=3, progress=False, **options).frame
        apart = [sl.scan(model, prompts.select([i]), progress=False, **options).frame for i in range(4)]
        columns = [column for column in NUMBERS if column != "boost"]
        mean = sum(frame[columns] for frame in apart) / 4
        assert np.nanmax((together[columns] - mean).abs().to_numpy()) < 1e-5

    def test_a_sliding_window_sees_no_first_token(self) -> None:
        """'Not visible' is not 'no sink': prompts longer than the window, layer 0 slides."""
        model = tiny.causal("Mistral")
        prompts = sl.PromptSet.from_tokens(tiny.tokens(2, 40))
        found = sl.scan(model, prompts, rule=sl.SinkRule(skip_rows=10), progress=False).frame
        assert (found.sink_mass == 0).all()
        assert (found.uniform_mass == 0).all()
        assert found.boost.isna().all()

    def test_low_precision_and_length(self) -> None:
        """Trial case 13: a bfloat16 copy at 2048 tokens gives the same classes."""
        model = tiny.causal("Llama", max_position_embeddings=2048, gain=3)
        prompts = sl.PromptSet.from_tokens(tiny.tokens(1, 2048))
        full = sl.scan(model, prompts, progress=False).frame
        low = sl.scan(model.to(torch.bfloat16), prompts, progress=False).frame
        assert (full[["sink_mass", "row_sum"]] - low[["sink_mass", "row_sum"]]).abs().max().max() < 5e-3
        assert ((full.sink_mass > 0.3) == (low.sink_mass > 0.3)).all()

    def test_patched_heads_are_seen_as_patched(self) -> None:
        model = tiny.causal()
        prompts = sl.PromptSet.from_tokens(tiny.tokens(2, 24))
        before = sl.scan(model, prompts, progress=False).frame
        with sl.patched(model, sl.DropSink(), heads=[(1, 1)]):
            after = sl.scan(model, prompts, progress=False).frame
        changed = (before.sink_mass - after.sink_mass).abs() > 1e-6
        assert after.sink_mass[5] == 0
        assert changed[5]
        assert not changed[:4].any()


@pytest.mark.slow
def test_a_large_scan_fits() -> None:
    """Trial case 14: 12 layers x 12 heads x 4096 tokens under 4 GB."""
    model = tiny.causal("Llama", num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, hidden_size=96,
                        max_position_embeddings=4096)  # fmt: skip
    prompts = sl.PromptSet.from_tokens(tiny.tokens(1, 4096))
    found = sl.scan(model, prompts, max_bytes=4 * 10**9, progress=False)
    assert len(found.frame) == 144


class TestGuards:
    def test_too_short(self) -> None:
        with pytest.raises(
            sl.InputError, match="the first 8 rows are left out: expected prompts of more than 8 tokens, got 6"
        ):
            sl.scan(tiny.causal(), sl.PromptSet.from_tokens(tiny.tokens(1, 6)), progress=False)

    def test_too_large(self) -> None:
        with pytest.raises(MemoryLimitError, match=r"the run would not fit: expected at most 1,000 bytes, got about"):
            sl.scan(tiny.causal(), sl.PromptSet.from_tokens(tiny.tokens(1, 16)), max_bytes=1000, progress=False)

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda: sl.SinkRule(eps=2), "a mass threshold lies between 0 and 1: expected 0 < eps < 1, got 2"),
            (
                lambda: scan_rows(uniform(16)[None]).top(0),
                "a selection holds at least one head: expected top of 1 or more, got 0",
            ),
            (lambda: scan_rows(uniform(16)[None]).sinks(1.5), "a mass threshold lies between 0 and 1"),
            (lambda: sl.SinkKeys(first=0), "a sink needs at least one key"),
            (lambda: sl.SinkKeys.at(-1), "sink positions count from 0"),
        ],
    )
    def test_nonsense(self, call: Any, text: str) -> None:
        with pytest.raises(sl.InputError, match=text):
            call()


def test_save_and_load(tmp_path: Path) -> None:
    """Trial case 18: results round-trip, nothing half-written stays, the figure is the same."""
    found = scan_rows(torch.stack([uniform(16), torch.eye(16)]))
    found.save(tmp_path)
    again = sl.SinkScan.load(tmp_path)
    assert again.frame.equals(found.frame)
    assert again.frames["sequences"].equals(found.frames["sequences"])
    assert dict(again.settings) == dict(found.settings)
    assert again.plot().to_json() == found.plot().to_json()
    written = ["scan.json", "scan.parquet", "scan.passages.parquet", "scan.sequences.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == written
    assert again.frames["passages"].equals(found.frames["passages"])
    with pytest.raises(sl.InputError, match="no scan result here"):
        sl.SinkScan.load(tmp_path / "nothing")


def test_intervals_cover_and_pair() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        counts = generator.integers(1, 20, 40)
        totals = np.array([generator.normal(1.0, 1.0, n).sum() for n in counts])
        interval = ratio_interval(totals, counts, resamples=500, rng=generator)
        hits += interval.low <= 1.0 <= interval.high
    assert hits >= 88  # 95 % nominal; 88 is 3 standard errors below
    assert np.isnan(ratio_interval([0.0], [0.0]).estimate)
    assert np.isnan(ratio_interval([1.0, 2.0], [1.0, 1.0]).low)
    assert ratio_interval([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).high == 1.0


def test_summaries_are_pure(tmp_path: Path) -> None:
    activity = sl.record_activity(tiny.causal(), sl.PromptSet.from_tokens(tiny.tokens(2, 16)), progress=False)
    tables = [summarize(activity, sl.SinkRule(), {"rule": {"eps": 0.3}}, {}).frame for _ in range(2)]
    assert tables[0].equals(tables[1])


def test_bidirectional_uniform_mass() -> None:
    call = AttentionCall(Site(0, "x", "bidirectional", 1, 1), *(torch.zeros(1, 1, 5, 4),) * 3, None, False, 1.0)
    result = attend(call)
    torch.testing.assert_close(result.weights(), torch.full((1, 1, 5, 5), 0.2))
    from sinklens.observe import _uniform_mass

    torch.testing.assert_close(_uniform_mass(call, sl.SinkKeys()), torch.full((1, 5), 0.2))
