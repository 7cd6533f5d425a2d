"""Finding: which heads sleep until which tokens wake them, or park when some come; named on one half, confirmed on the
other.

Sequences are split once into DISC and CONF. On DISC heads pass a gate, every feature is tested against the
circular-shift null, and each head's smallest trigger set is chosen; on CONF the set is tested again (Holm over all
sets) and scored, with intervals over sequences. Only the counterfactual check is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from tqdm.auto import tqdm

from sinklens.errors import InputError
from sinklens.observe import Activity, record_activity
from sinklens.prompts import PromptSet
from sinklens.table import provenance
from sinklens.triggers import awake
from sinklens.triggers import counterfactual as edits
from sinklens.triggers.describing import members_table, passages_table, thresholds_table, tokens_of
from sinklens.triggers.features import FAMILIES, Feature, TokenTable, tracks, vocabulary
from sinklens.triggers.report import TriggerReport
from sinklens.triggers.selection import choose_sets, random_token_sets, shifted_states, union_of
from sinklens.triggers.states import read_states, record_located
from sinklens.triggers.statistics import (
    Coverage,
    ShiftNull,
    auroc,
    cluster_interval,
    coverage_numbers,
    one_sided,
    pair_risk_differences,
    residualize,
    screen,
    strata,
    two_modes,
)
from sinklens.triggers.study import Case, Protocol, Study, split
from sinklens.vocabulary import SinkKeys

CASE = ["layer", "head", "direction"]


def find_triggers(
    model: object,
    prompts: PromptSet,
    *,
    features: Sequence[str | Feature] = tuple(FAMILIES),
    sink_keys: SinkKeys | None = None,
    protocol: Protocol | None = None,
    activity: Activity | None = None,
    counterfactual: bool = True,
    reading: bool = True,
    function: int = 0,
    batch_size: int = 2,
    progress: bool = True,
) -> TriggerReport:
    """Find the heads that sleep on the sink until some tokens wake them, or that park when some come.

    Args:
        model: A transformers model, a TransformerBridge, or a model with TransformerLens hooks.
        prompts: At least 60 sequences by default, each of more than ``skip_rows + 2 min_shift`` tokens.
        features: Families of :data:`FAMILIES` by name, and features of your own.
        sink_keys: Which keys count as the sink; by default wherever most heads park in each sequence.
        protocol: Thresholds, sizes and seed.
        activity: A recording of the same prompts, to spare the pass.
        counterfactual: Put triggers in and take them out; without it no grade above "associated".
        reading: Also say what an awake head reads.
        function: How many of the best explained heads to ablate as well, comparing the loss at triggers with other
            tokens (slow).
        batch_size: Sequences a forward pass.
        progress: Show progress bars.

    Raises:
        InputError: Too few or too short sequences (says how many are needed), an unknown feature, or a recording of
            other prompts.

    Example:
        >>> report = sl.find_triggers(model, sl.PromptSet.builtin(tokenizer))    # doctest: +SKIP
        >>> report.show("L20H8")                                                 # doctest: +SKIP
    """
    protocol = protocol or Protocol()
    _check_size(prompts, protocol)
    table = TokenTable.of(prompts)
    named = vocabulary(table, features, 2 * protocol.feature_sequences)
    if activity is None:
        options: dict[str, Any] = {"batch_size": batch_size, "skip_rows": protocol.skip_rows, "progress": progress}
        activity = (record_located(model, prompts, **options) if sink_keys is None
                    else record_activity(model, prompts, sink_keys=sink_keys, **options))  # fmt: skip
    if activity.prompts.fingerprint != prompts.fingerprint:
        raise InputError("a recording belongs to its prompts", expected=prompts.fingerprint,
                         got=activity.prompts.fingerprint)  # fmt: skip
    states = read_states(activity, protocol.skip_rows, asleep=protocol.asleep)
    study = Study(prompts, activity, states, table, *split(prompts), protocol)
    settings = _settings(study, named, counterfactual, function)
    made_from = provenance(model, prompts.facts())
    rows, signs, why = gate(study)
    if not len(rows):
        return TriggerReport.empty({**settings, "why_empty": why}, made_from)
    cases, evidence = discover(study, rows, signs, named, progress)
    if not cases:
        why = f"{len(set(rows))} heads pass the gate, but no feature explains when any of them changes state"
        return TriggerReport.empty({**settings, "gated": len(set(rows)), "why_empty": why}, made_from)
    frame = confirm(study, cases)
    best = np.argsort(-frame.explained.to_numpy(), kind="stable")
    chosen = [cases[k] for k in best if frame.confirmed[k]]
    frames = {"members": members_table(study, cases, evidence), "thresholds": thresholds_table(study, cases),
              "passages": passages_table(study, chosen)}  # fmt: skip
    if chosen and counterfactual:
        verdicts, frames["counterfactual"] = edits.check(model, study, chosen[: protocol.checks],
                                                         batch_size=batch_size, progress=progress)  # fmt: skip
        frame = frame.merge(verdicts, on=CASE, how="left")
    if chosen and reading:
        frame = frame.merge(awake.what_it_reads(model, study, chosen, batch_size=batch_size), on=CASE, how="left")
    if chosen and function:
        made = awake.what_it_does(model, study, chosen[:function], batch_size=batch_size, progress=progress)
        frame = frame.merge(made, on=CASE, how="left")
    frame["counterfactual"] = frame.counterfactual.fillna("not run") if "counterfactual" in frame else "not run"
    frame["grade"] = grade(frame)
    return TriggerReport.of(frame, {**settings, "gated": len(set(rows)), "sets": len(cases)}, made_from, frames)


def _check_size(prompts: PromptSet, protocol: Protocol) -> None:
    needed = 2 * max(protocol.sequences, protocol.feature_sequences)
    shortest = protocol.skip_rows + 2 * protocol.min_shift + 1
    enough = int((prompts.mask.sum(-1) >= shortest).sum())
    if enough < needed:
        raise InputError("triggers are named on half of the sequences and confirmed on the other half",
                         expected=f"at least {needed} sequences of {shortest} tokens or more",
                         got=f"{enough} of {len(prompts)}")  # fmt: skip


def _settings(study: Study, named: Sequence[Feature], counterfactual: bool, function: int) -> dict[str, Any]:
    return {
        "protocol": asdict(study.protocol), "sink_keys": study.activity.sink_keys.describe(), "features": len(named),
        "heads": len(study.states.heads), "counterfactual": counterfactual, "function": function,
        "discovery_sequences": len(study.disc), "confirmation_sequences": len(study.conf),
        "counted_tokens": int(study.states.counted.sum()), "silent_heads": int(study.states.silent.sum()),
        "blind_heads": int(study.states.blind.sum()), "split": "alternating, within domains",
    }  # fmt: skip


# ---- discovery ------------------------------------------------------------------------------------------------------


def gate(study: Study) -> tuple[np.ndarray, np.ndarray, str]:
    """Heads with two states on DISC: their rows, signs, and, if there is none, why in words."""
    states, protocol, counted = study.states, study.protocol, study.states.counted[study.disc]
    if (counted.sum(-1) > 2 * protocol.min_shift).sum() < protocol.sequences:
        none = np.zeros(0, dtype=int)
        return none, none, "too few tokens see the sink from afar: it lies late in the sequences, or outside a window"
    asleep = states.asleep[:, study.disc] & counted
    share = asleep.sum((1, 2)) / max(counted.sum(), 1)
    both = np.minimum(asleep.any(-1).sum(-1), (~asleep & counted).any(-1).sum(-1)) >= protocol.sequences
    modes = two_modes(states.score[:, study.disc][:, counted]).bic_gain > protocol.bic_gain
    low, high = protocol.usual
    passes = both & modes & ~states.blind
    found = [(np.flatnonzero(passes & (usual >= low) & (usual <= high)), sign)
             for sign, usual in ((1, share), (-1, 1 - share))]  # fmt: skip
    rows = np.concatenate([r for r, _ in found])
    signs = np.concatenate([np.full(len(r), sign) for r, sign in found])
    top = int(share.argmax())
    ranges = [(share >= low) & (share <= high), (1 - share >= low) & (1 - share <= high)]
    why = (
        f"no head passes the gate: of {len(share)} heads {int((ranges[0] | ranges[1]).sum())} are in their usual state "
        f"at {low:g} to {high:g} of the tokens, {int(both.sum())} show both states in {protocol.sequences} sequences, "
        f"{int(modes.sum())} have two modes, {int(states.blind.sum())} do not always see the sink; the "
        f"sleepiest, {states.heads[top]}, sleeps at {share[top]:.2f} of the tokens"
        + ("" if share[top] > 0 else ": the model has no sink")
    )
    return rows, signs, why


def discover(study: Study, rows: np.ndarray, signs: np.ndarray, named: Sequence[Feature], progress: bool
             ) -> tuple[list[Case], pd.DataFrame]:  # fmt: skip
    """Screen all features on DISC and choose each head's smallest trigger set; the evidence of every member beside."""
    protocol, counted = study.protocol, study.states.counted
    every = tracks(study.table, named)
    here = every & counted
    spread = np.stack([here[:, half].any(-1).sum(-1) for half in (study.disc, study.conf)]).min(0)
    kept = np.flatnonzero(spread >= protocol.feature_sequences).tolist()
    every, named = every[kept], [named[k] for k in kept]
    disc, mask = study.disc, counted[study.disc]
    heads, case_head = np.unique(rows, return_inverse=True)
    score = residualize(study.states.score[heads][:, disc], mask, strata(mask))
    null = ShiftNull(score, mask, draws=protocol.draws, min_shift=protocol.min_shift, rng=study.rng(1))
    with tqdm(total=len(named), desc="testing features", unit="feature", disable=not progress) as bar:
        result = screen(null, every[:, disc], bar.update)
    known = stats.false_discovery_control(result.p.ravel()).reshape(result.p.shape) <= protocol.q
    awake = ~study.states.asleep[heads][:, disc]
    difference = np.nan_to_num(pair_risk_differences(awake[:, mask], every[:, disc][:, mask], strata(mask)[mask]))
    directed = signs[:, None] * np.stack([result.z, difference])[:, case_head]
    allowed = known[case_head] & (directed > 0).all(0)
    sets = choose_sets(study.state(rows, signs, disc), every[:, disc], mask, allowed, max_size=protocol.max_size)
    cases, evidence = [], []
    unions = union_of(sets.members, every, counted)
    for number, members in enumerate(sets.members):
        if not members:
            continue
        row, head = int(rows[number]), case_head[number]
        case = Case(study.states.heads[row], row, int(signs[number]), tuple(named[m] for m in members),
                    unions[number])  # fmt: skip
        cases.append(case)
        evidence += [{**case.key, "feature": named[m].name, "z": result.z[head, m], "p_max": result.p_max[head, m]}
                     for m in members]  # fmt: skip
    return cases, pd.DataFrame(evidence)


# ---- confirmation ---------------------------------------------------------------------------------------------------


def confirm(study: Study, cases: Sequence[Case]) -> pd.DataFrame:
    """Test and score the sets on CONF, and compare them with two baselines."""
    protocol, conf = study.protocol, study.conf
    counted = study.states.counted[conf]
    rows, signs = (np.array([getattr(case, name) for case in cases]) for name in ("row", "sign"))
    union = np.stack([case.union for case in cases])[:, conf] & counted
    state, score = study.state(rows, signs, conf), study.states.score[rows][:, conf] * signs[:, None, None]
    bins = strata(counted)
    p = holm(_shift_test(study, score, union, bins))
    counts = Coverage.of(state, union, counted, bins).counts
    numbers = coverage_numbers(counts.sum(0))
    difference, low, high = cluster_interval(counts, lambda t: coverage_numbers(t)["risk_difference"],
                                             resamples=protocol.resamples, rng=study.rng(3))  # fmt: skip
    norm, inside, outside = study.states.norm[rows][:, conf], union & counted, ~union & counted
    at, elsewhere = ((norm * here).sum((1, 2)) / np.maximum(here.sum((1, 2)), 1) for here in (inside, outside))
    baselines = _baselines(study, state, union)
    asleep = (study.states.asleep & study.states.counted).sum((1, 2)) / study.states.counted.sum()
    frame = pd.DataFrame([case.key for case in cases])
    return frame.assign(
        trigger=[", ".join(feature.words for feature in case.members) for case in cases],
        tokens=[", ".join(tokens_of(study, case)) for case in cases],
        dormant_fraction=asleep[rows],
        auroc=auroc(score[:, counted], union[:, counted]),
        precision=numbers["precision"], recall=numbers["recall"], f1=numbers["f1"],
        risk_difference=difference, low=low, high=high, p_adjusted=p,
        **baselines, explained=numbers["f1"] - baselines["f1_shuffled"],
        size=[len(case.members) for case in cases],
        occurrences=inside.sum((1, 2)), sequences=inside.any(-1).sum(-1), output_ratio=at / np.maximum(elsewhere, 1e-9),
        sleeps_by=np.where(study.states.silent[rows], "silence", "sink"),
        confirmed=(p <= protocol.q) & (low > protocol.effect),
    )  # fmt: skip


def _shift_test(study: Study, score: np.ndarray, union: np.ndarray, bins: np.ndarray, block: int = 128) -> np.ndarray:
    """p-values of all sets on CONF, some heads at a time, with enough draws for Holm to reach its level."""
    protocol, counted = study.protocol, study.states.counted[study.conf]
    draws = max(protocol.draws, int(4 * len(score) / protocol.q))
    parts = []
    for start in range(0, len(score), block):
        part = slice(start, start + block)
        null = ShiftNull(residualize(score[part], counted, bins), counted, draws=draws, min_shift=protocol.min_shift,
                         rng=study.rng(2))  # fmt: skip
        parts.append(one_sided(null, union[part], np.ones(len(union[part]))))
    return np.concatenate(parts)


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down adjustment of p-values."""
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def _baselines(study: Study, state: np.ndarray, union: np.ndarray) -> dict[str, np.ndarray]:
    """F1 of the same set on rotated states (shuffled labels), and of random token sets as frequent as the set."""
    counted, codes, rng = study.states.counted[study.conf], study.table.codes[study.conf], study.rng(4)

    def f1(labels: np.ndarray, marked: np.ndarray) -> np.ndarray:
        return 2 * (labels & marked).sum((1, 2)) / np.maximum(labels.sum((1, 2)) + marked.sum((1, 2)), 1)

    moved = [f1(shifted_states(state, counted, study.protocol.min_shift, rng), union) for _ in range(10)]
    drawn = [f1(state, random_token_sets(union, codes, counted, rng)) for _ in range(10)]
    return {"f1_shuffled": np.mean(moved, 0), "f1_random_tokens": np.mean(drawn, 0)}


def grade(frame: pd.DataFrame) -> list[str]:
    """``strict`` or ``graded`` with a passed counterfactual check, ``associated`` without, else ``unconfirmed``."""
    sharp = (frame.auroc >= 0.9) & (frame.precision >= 0.5) & (frame.recall >= 0.5) & (frame.risk_difference >= 0.3)
    causal = frame.counterfactual == "passed"
    kinds = np.select([~frame.confirmed, ~causal, sharp], ["unconfirmed", "associated", "strict"], "graded")
    return kinds.tolist()
