"""The counterfactual check: put a trigger in, take one out, and see whether the head follows.

The only causal step of the protocol. A trigger token and a control token of like frequency stand in turn at the same
place of the same passage; *insertion* does this where neither stood, *removal* where the trigger stood. Differences are
paired, and intervals are over sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from sinklens.measures import ratio_interval
from sinklens.observe import record_activity
from sinklens.prompts import PromptSet
from sinklens.triggers.features import Feature, spoken
from sinklens.triggers.states import score_of
from sinklens.triggers.study import Case, Study

SITES, TRIGGERS, CONTROLS = 16, 2, 8
"""Sequences of each edit, trigger tokens of each set (the commonest), and control tokens of each trigger."""
WINDOW, LATER = 32, 96
"""Tokens are put in within 32 counted tokens of the sequence's start, and taken out within 96: edited passages end
where the head is read, so early ones cost little."""
ENOUGH = 8
"""Fewest sequences for a verdict."""


@dataclass(frozen=True)
class Trial:
    """One passage with one token replaced.

    Attributes:
        sequence: Which sequence.
        place: Where the token is put.
        read: Where the head is read, at or after ``place``.
        code: Number of the token put there.
    """

    sequence: int
    place: int
    read: int
    code: int


@dataclass(frozen=True)
class Pair:
    """A trigger against a control; ``trigger`` is None where the trigger stands there by itself."""

    trigger: Trial | None
    control: Trial


def check(model: object, study: Study, cases: Sequence[Case], *, batch_size: int = 2, progress: bool = True
          ) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """Check cases, sharing edited passages among heads.

    Returns:
        One row a case with its verdict (``passed`` if the lower bounds of both edits are above 0), and one row a case,
        token and edit.
    """
    plans = [plan(study, case) for case in cases]
    pairs = [pair for made in plans for edits in made.values() for pair in edits]
    trials = list(dict.fromkeys(t for pair in pairs for t in (pair.trigger, pair.control) if t is not None))
    outcomes = _Outcomes(study, trials, *run(model, study, trials, batch_size, progress))
    verdicts, rows = [], []
    for case, made in zip(cases, plans, strict=True):
        verdict: dict[str, Any] = {}
        for edit in ("insert", "remove"):
            of_edit = {token: p for (token, kind), p in made.items() if kind == edit}
            whole = outcomes.compare(case, [pair for part in of_edit.values() for pair in part])
            verdict |= {edit: whole["change"], f"{edit}_low": whole["low"], f"{edit}_high": whole["high"],
                        f"{edit}_state": whole["state"], f"{edit}_sequences": whole["sequences"]}  # fmt: skip
            rows += [{**case.key, "token": spoken(study.table.texts[code]), "offset": offset, "edit": edit,
                      **outcomes.compare(case, part)} for (code, offset), part in of_edit.items()]  # fmt: skip
        verdicts.append({**case.key, "counterfactual": _verdict(verdict), **verdict})
    return pd.DataFrame(verdicts), pd.DataFrame(rows)


def _verdict(numbers: dict[str, Any]) -> str:
    if min(numbers["insert_sequences"], numbers["remove_sequences"]) < ENOUGH:
        return "not testable"
    return "passed" if numbers["insert_low"] > 0 and numbers["remove_low"] > 0 else "failed"


# ---- which edits ----------------------------------------------------------------------------------------------------


def plan(study: Study, case: Case) -> dict[tuple[tuple[int, int], str], list[Pair]]:
    """The pairs of each ``((token, offset), edit)`` of a case; empty where no feature of the set speaks of a token."""
    made = {}
    for code, offset in trigger_tokens(study, case):
        controls = control_tokens(study, case, code, offset)
        if len(controls):
            made[(code, offset), "insert"] = _insertions(study, case, code, offset, controls)
            made[(code, offset), "remove"] = _removals(study, case, code, offset, controls)
    return made


def trigger_tokens(study: Study, case: Case) -> list[tuple[int, int]]:
    """The commonest trigger tokens of a set and how far before the head they stand."""
    counts: dict[tuple[int, int], int] = {}
    for feature in filter(_editable, case.members):
        for code, hits in enumerate(study.hits(case, feature)):
            if hits:
                counts[code, feature.offset] = counts.get((code, feature.offset), 0) + int(hits)
    return sorted(counts, key=lambda key: -counts[key])[:TRIGGERS]


def _editable(feature: Feature) -> bool:
    """Whether a set's feature speaks of one token that can be replaced."""
    return feature.side == "query" or feature.offset > 0


def control_tokens(study: Study, case: Case, code: int, offset: int) -> np.ndarray:
    """Tokens that are no trigger at this offset, the nearest in log frequency."""
    counts = study.table.counts()
    barred = np.zeros(len(counts), dtype=bool)
    for feature in case.members:
        if _editable(feature) and feature.offset == offset:
            sequences, places = np.nonzero(feature.track(study.table))
            barred[study.table.codes[sequences, places - offset]] = True
    barred[code] = True
    # What opens every sequence is no ordinary token.
    barred[study.table.codes[np.arange(len(study.prompts)), study.prompts.starts.numpy()]] = True
    free = np.flatnonzero(~barred & (counts > 0))
    distance = np.abs(np.log(counts[free]) - np.log(max(counts[code], 1)))
    return free[np.argsort(distance, kind="stable")[:CONTROLS]]


def _insertions(study: Study, case: Case, code: int, offset: int, controls: np.ndarray) -> list[Pair]:
    pairs = []
    spread = np.unique(np.linspace(0, len(study.conf) - 1, min(SITES, len(study.conf))).round().astype(int))
    for sequence in study.conf[spread]:
        # The same order of places for every case, so that cases share passages.
        window = np.flatnonzero(study.states.counted[sequence])[offset : offset + WINDOW]
        window = study.rng(100 + int(sequence)).permutation(window)
        standing = study.table.codes[sequence, window - offset]
        free = window[~case.union[sequence, window] & (standing != code)]
        if len(free):
            read = int(free[0])
            control = int(controls[(int(sequence) + code) % len(controls)])
            trigger, other = (Trial(int(sequence), read - offset, read, c) for c in (code, control))
            pairs.append(Pair(trigger, other))
    return pairs


def _removals(study: Study, case: Case, code: int, offset: int, controls: np.ndarray) -> list[Pair]:
    pairs: list[Pair] = []
    for sequence in study.conf:
        window = np.flatnonzero(study.states.counted[sequence])[offset : offset + LATER]
        standing = window[study.table.codes[sequence, window - offset] == code]
        if len(standing) and len(pairs) < SITES:
            read = int(standing[0])
            control = int(controls[(int(sequence) + code) % len(controls)])
            pairs.append(Pair(None, Trial(int(sequence), read - offset, read, control)))
    return pairs


# ---- running and comparing ------------------------------------------------------------------------------------------


def run(model: object, study: Study, trials: Sequence[Trial], batch_size: int, progress: bool
        ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Sink mass and output norm of every head where it is read, each ``[head, trial]``."""
    heads = len(study.states.heads)
    mass, norm = np.zeros((heads, len(trials)), dtype=np.float32), np.zeros((heads, len(trials)), dtype=np.float32)
    order = np.argsort([trial.read for trial in trials], kind="stable")
    batch = 8 * batch_size
    with tqdm(total=len(trials), desc="changing tokens", unit="edit", disable=not progress) as bar:
        for part in np.array_split(order, max(1, -(-len(order) // batch))) if len(order) else []:
            some = [trials[i] for i in part]
            keys = study.activity.sink_keys.select(torch.tensor([trial.sequence for trial in some]))
            activity = record_activity(model, edited(study, some), sink_keys=keys, batch_size=batch, skip_rows=0,
                                       locate=False, progress=False)  # fmt: skip
            reads = [trial.read for trial in some]
            mass[:, part], norm[:, part] = (a[:, np.arange(len(some)), reads] for a in (activity.mass, activity.norm))
            bar.update(len(some))
    return mass, norm


def edited(study: Study, trials: Sequence[Trial]) -> PromptSet:
    """The trials' passages; those of causal models end where the last head is read."""
    prompts = study.prompts.select([trial.sequence for trial in trials])
    tokens = prompts.tokens.clone()
    for row, trial in enumerate(trials):
        # A token is taken over from where it stands, so that inputs without ids can be edited too.
        donor = np.argwhere(study.table.codes == trial.code)[0]
        tokens[row, trial.place] = study.prompts.tokens[donor[0], donor[1]]
    last = max(trial.read for trial in trials) + 1 if study.causal else prompts.length
    labels = None if prompts.labels is None else tuple(row[:last] for row in prompts.labels)
    return replace(prompts, tokens=tokens[:, :last], mask=prompts.mask[:, :last], labels=labels)


class _Outcomes:
    """Scores and states of every trial, and of the places where a trigger stands by itself."""

    def __init__(self, study: Study, trials: Sequence[Trial], mass: np.ndarray, norm: np.ndarray) -> None:
        self.study, self.norm = study, norm
        self.column = {trial: i for i, trial in enumerate(trials)}
        states = study.states
        self.score, self.asleep = score_of(mass, norm, states.silent, states.reference, study.protocol.asleep)

    def compare(self, case: Case, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Paired change of score (with interval), state and output, signed towards the case's direction."""
        states, row = self.study.states, case.row
        sequences = np.array([pair.control.sequence for pair in pairs], dtype=int)
        reads = np.array([pair.control.read for pair in pairs], dtype=int)
        control = np.array([self.column[pair.control] for pair in pairs], dtype=int)
        trigger = np.array([-1 if p.trigger is None else self.column[p.trigger] for p in pairs], dtype=int)

        def both(edited: np.ndarray, natural: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            there = np.where(trigger < 0, natural[row, sequences, reads], edited[row, trigger])
            return there.astype(float), edited[row, control].astype(float)

        score, state, output = (both(*arrays) for arrays in (
            (self.score, states.score), (self.asleep, states.asleep), (self.norm, states.norm)))  # fmt: skip
        change = case.sign * (score[0] - score[1])
        ratio = np.log((output[0] + 1e-9) / (output[1] + 1e-9))
        clusters = np.unique(sequences)
        sums = [change[sequences == c].sum() for c in clusters]
        sizes = [(sequences == c).sum() for c in clusters]
        interval = asdict(ratio_interval(sums, sizes, rng=self.study.rng(5)))
        return {"change": interval["estimate"], "low": interval["low"], "high": interval["high"],
                "state": float(case.sign * (state[1] - state[0]).mean()) if len(pairs) else np.nan,
                "output_ratio": float(np.exp(ratio.mean())) if len(pairs) else np.nan,
                "sequences": len(clusters)}  # fmt: skip
