"""Verdicts on heads whose answer is known, and runs that are killed and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sinklens as sl
from sinklens.causal import INTERVENTIONS, calibrate, fit_relu, interventions
from sinklens.causal.rule import Evidence
from sinklens.causal.verdicts import MEANINGS
from tests import killing, tiny, verdict_plants


@pytest.mark.parametrize("kind", verdict_plants.EXPECTED)
def test_a_planted_head_gets_its_verdict(kind: verdict_plants.Kind) -> None:
    found = verdict_plants.verdict(kind, seed=3).frame.iloc[0]
    assert found.verdict in verdict_plants.EXPECTED[kind], found.reason


def test_a_head_as_it_is_born_supports_nothing() -> None:
    found = verdict_plants.verdict("random", seed=3)
    assert not found.frame.verdict.str.startswith("supports").any()
    assert set(found.frame.verdict) <= set(MEANINGS)


def test_a_verdict_needs_its_runs() -> None:
    found = run(tiny.causal(), interventions=["Z"])
    with pytest.raises(sl.InputError, match="a verdict needs the interventions done state by state"):
        found.verdicts()


def run(model: Any, heads: Any = "L1H2", count: int = 8, **options: Any) -> sl.Contrast:
    prompts = options.pop("on", None) or sl.PromptSet.from_tokens(tiny.tokens(count, 24))
    return sl.contrast(model, prompts, heads, resamples=100, progress=False, **options)


def test_a_second_look_only_where_the_first_leaves_it_open() -> None:
    def looked(kind: verdict_plants.Kind) -> set[str]:
        totals = verdict_plants.contrast_of(kind, 0).frames["totals"]
        return set(totals[totals["at"] == "dormant"].intervention)

    assert looked("asleep") == {"Z", "C1"}
    assert looked("constant") == {"Z", "C1", "C1m"}
    assert looked("clean") - {"C4f", "C4f2"} == {"Z", "C1", "C2", "R1", "R2"}
    # One ReLU, the one that fitted the calibration tokens better.
    assert len(looked("clean") & {"C4f", "C4f2"}) == 1


@pytest.mark.parametrize(
    ("left", "verdict"), [(0.05, "constant bias"), (0.2, "undecided"), (0.6, "broadcast"), (1.5, "broadcast")]
)
def test_what_the_mean_leaves_of_the_cost_tells_a_constant_from_a_broadcast(left: float, verdict: str) -> None:
    """All four shares are far above the margin: it is the share that decides, and an interval across .2 is open."""
    contrast = verdict_plants.contrast_of("broadcast", 3)
    totals = contrast.frames["totals"].copy()
    keys = ["heads", "at", "tokens", "sequence"]
    dropped = totals[totals.intervention == "C1"].set_index(keys).kl
    put = totals.intervention == "C1m"
    noise = 1 + 0.1 * np.cos(np.arange(put.sum()))
    totals.loc[put, "kl"] = left * noise * dropped[totals[put].set_index(keys).index].to_numpy()
    found = Evidence(totals, contrast.frames["shares"], contrast.frames["fits"], "L0H1", 200, 0)
    assert left * found.mean("C1", "dormant") > 3 * found.margin
    assert found.verdict()[0] == verdict


def test_every_intervention_runs() -> None:
    found = run(tiny.causal(), interventions=list(INTERVENTIONS), controls=False)
    assert list(found.effects("L1H2").index) == list(INTERVENTIONS)
    assert np.isfinite(found.frame.estimate[found.frame["count"] > 0]).all()
    # What only moves the output: the same size as C2's change, elsewhere.
    effects = found.effects("L1H2")
    assert effects.loc["C2n", "output_error"] > 0
    assert effects.loc["C2n", "output_error"] != pytest.approx(effects.loc["C2", "output_error"])
    assert len(found.frames["fits"]) == 2


def test_doses_lead_from_nothing_to_everything() -> None:
    doses = [INTERVENTIONS["C2"].dose(alpha) for alpha in (0.0, 0.5, 1.0)]
    effects = run(tiny.causal(), interventions=[*doses, "C2"], controls=False).effects("L1H2").kl
    assert effects["C2@0"] < 1e-6
    assert effects["C2@0"] < effects["C2@0.5"] < effects["C2@1"]
    assert effects["C2@1"] == pytest.approx(effects["C2"], rel=1e-4)
    with pytest.raises(sl.InputError, match="a dose lies between nothing and all"):
        INTERVENTIONS["C2"].dose(1.5)
    with pytest.raises(sl.InputError, match="doses are mixtures of weights"):
        INTERVENTIONS["C2n"].dose(0.5)


def test_a_fit_finds_the_relu_that_a_head_runs_on() -> None:
    """A head patched to a ReLU is fitted by that ReLU, without error."""
    model, prompts = tiny.causal("GPT2"), sl.PromptSet.from_tokens(tiny.tokens(6, 40))
    truth = sl.DropSink(sl.ReLU(scale="visible", gain=0.7, threshold=0.0, count_exponent=0.5))
    with sl.patched(model, truth, "L1H2"):
        # Watching a patched model: the fit sees the scores of the model and the output of the patch.
        fit = fit_relu(model, prompts, "L1H2")[sl.Head(1, 2)]
    assert fit.error["all"] < 0.02
    assert fit.normalizer.count_exponent == 0.5
    worse = fit_relu(model, prompts, "L1H2")[sl.Head(1, 2)]
    assert worse.error["all"] > fit.error["all"]


def test_means_are_means() -> None:
    model, prompts = tiny.causal(), sl.PromptSet.from_tokens(tiny.tokens(3, 20))
    found = calibrate(model, prompts, "L1H2", fit=False)[sl.Head(1, 2)]
    pattern = sl.attention_patterns(model, prompts, "L1H2")[sl.Head(1, 2)]
    assert found.relu == {}
    assert torch.isfinite(found.sink).all()
    assert float(found.sink.norm()) <= float(pattern[:, 8:, 0].max()) * 1e3


class TestJournal:
    def test_a_run_goes_on_where_it_stopped(self, tmp_path: Path) -> None:
        model = tiny.causal()
        whole = run(model, "L0H1,L1H2", judge=True, journal=tmp_path / "whole.jsonl")
        lines = (tmp_path / "whole.jsonl").read_text().splitlines()
        for kept in (1, 2, len(lines) // 2, len(lines) - 1):
            cut = tmp_path / f"cut-{kept}.jsonl"
            cut.write_text("\n".join(lines[:kept]) + "\n" + lines[kept][: len(lines[kept]) // 2])
            again = run(model, "L0H1,L1H2", judge=True, journal=cut)
            assert again.frame.equals(whole.frame)
            assert again.frames["totals"].equals(whole.frames["totals"])

    def test_kill_and_go_on(self, tmp_path: Path) -> None:
        whole = killing.finished(tmp_path / "whole")
        size = (tmp_path / "whole/j.jsonl").stat().st_size
        assert killing.killed(tmp_path / "killed", size // 3), "it ended before it could be killed"
        assert not (tmp_path / "killed/contrast.parquet").exists()
        assert killing.same(killing.finished(tmp_path / "killed"), whole)

    def test_another_runs_journal(self, tmp_path: Path) -> None:
        run(tiny.causal(), journal=tmp_path / "j.jsonl")
        with pytest.raises(sl.InputError, match="the journal here belongs to another run: expected the same model"):
            run(tiny.causal(seed=1), journal=tmp_path / "j.jsonl")
        edited = tiny.causal()
        with torch.no_grad():
            edited.model.layers[0].self_attn.q_proj.weight[0, 0] += 1.0  # one weight of one matrix in the middle
        with pytest.raises(sl.InputError, match="expected the same model"):
            run(edited, journal=tmp_path / "j.jsonl")
        with pytest.raises(sl.InputError, match="variants"):
            run(tiny.causal(), "L1H1", journal=tmp_path / "j.jsonl")

    def test_other_tokens_marked(self, tmp_path: Path) -> None:
        class Every:
            """Wakes a head at every fourth place, so that other places are as many."""

            def __init__(self, offset: int) -> None:
                self.offset = offset

            def marks(self, prompts: sl.PromptSet) -> dict[sl.Head, np.ndarray]:
                places = np.arange(prompts.tokens.shape[1]) % 4 == self.offset
                return {sl.Head(0, 1): np.broadcast_to(places, tuple(prompts.tokens.shape))}

        first = run(tiny.causal(), "L0H1", triggers=Every(0), journal=tmp_path / "j.jsonl")
        again = run(tiny.causal(), "L0H1", triggers=Every(0), journal=tmp_path / "j.jsonl")
        assert again.frame.equals(first.frame)
        with pytest.raises(sl.InputError, match="expected the same triggers,"):
            run(tiny.causal(), "L0H1", triggers=Every(1), journal=tmp_path / "j.jsonl")


def test_unknown_interventions() -> None:
    with pytest.raises(sl.InputError, match=r"unknown intervention: expected C0, C1, .* got C9"):
        run(tiny.causal(), interventions=["C9"])
    assert [i.id for i in interventions("Z, C1")] == ["Z", "C1"]


def test_verdicts_round_trip(tmp_path: Path) -> None:
    found = verdict_plants.verdict("clean", seed=1)
    found.save(tmp_path)
    assert sl.causal.Verdicts.load(tmp_path).frame.equals(found.frame)
    assert "1 supports fully" in found.reading()
    assert found.plot().data
