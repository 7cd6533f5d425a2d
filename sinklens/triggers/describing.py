"""Further tables of a report: its tokens, the members of its sets, other thresholds, and passages to look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sinklens.triggers.features import spoken
from sinklens.triggers.statistics import Coverage, coverage_numbers, strata
from sinklens.triggers.study import Case, Study

THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
"""Other thresholds of sleep, to see what depends on it."""
PASSAGES = 6


def tokens_of(study: Study, case: Case, most: int = 8) -> list[str]:
    """The commonest trigger tokens of a set on DISC, those that stand where its features look."""
    counts = sum((study.hits(case, feature) for feature in case.members), np.zeros(len(study.table.texts), dtype=int))
    best = np.argsort(-counts, kind="stable")[:most]
    return [spoken(study.table.texts[code]) for code in best if counts[code]]


def members_table(study: Study, cases: Sequence[Case], evidence: pd.DataFrame) -> pd.DataFrame:
    """One row a feature of a set, with its own numbers on CONF."""
    counted = study.states.counted[study.conf]
    bins, rows = strata(counted), []
    for case in cases:
        state = study.state(np.array([case.row]), np.array([case.sign]), study.conf)
        for feature in case.members:
            track = (feature.track(study.table)[study.conf] & counted)[None]
            rows.append({**case.key, "feature": feature.name, "side": feature.side, "words": feature.words,
                         "occurrences": int(track.sum()), **_numbers(state, track, counted, bins)})  # fmt: skip
    return pd.DataFrame(rows).merge(evidence, on=["layer", "head", "direction", "feature"])


def thresholds_table(study: Study, cases: Sequence[Case]) -> pd.DataFrame:
    """The same sets under other thresholds of sleep, on CONF."""
    counted, rows = study.states.counted[study.conf], []
    everywhere = np.zeros_like(counted, dtype=int)
    for case in cases:
        if study.states.silent[case.row]:
            continue
        marked = (case.union[study.conf] & counted)[None]
        for threshold in THRESHOLDS:
            asleep = (study.states.mass[case.row][study.conf] >= threshold) & counted
            state = (~asleep & counted if case.sign > 0 else asleep)[None]
            rows.append({**case.key, "asleep_from": threshold, "dormant_fraction": asleep.sum() / counted.sum(),
                         **_numbers(state, marked, counted, everywhere)})  # fmt: skip
    return pd.DataFrame(rows)


def _numbers(state: np.ndarray, track: np.ndarray, counted: np.ndarray, bins: np.ndarray) -> dict[str, float]:
    totals = Coverage.of(state, track, counted, bins).counts.sum(0)
    return {name: float(value[0]) for name, value in coverage_numbers(totals).items()}


def passages_table(study: Study, cases: Sequence[Case]) -> pd.DataFrame:
    """Some passages of CONF, evenly spaced and chosen without looking, with the state of every given head."""
    spread = np.linspace(0, len(study.conf) - 1, min(PASSAGES, len(study.conf))).round().astype(int)
    picks = study.conf[np.unique(spread)]
    rows, places = np.nonzero(study.prompts.mask.numpy()[picks])
    sequences = picks[rows]
    names = np.array(study.prompts.names)[sequences]
    texts = [study.prompts.token(int(s), int(p)) for s, p in zip(sequences, places, strict=True)]
    parts = [pd.DataFrame({
        **case.key, "passage": names, "position": places, "token": texts,
        "awake": _wakefulness(study, case.row)[sequences, places], "trigger": case.union[sequences, places],
        "counted": study.states.counted[sequences, places],
    }) for case in cases]  # fmt: skip
    columns = ["layer", "head", "direction", "passage", "position", "token", "awake", "trigger", "counted"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def _wakefulness(study: Study, row: int) -> np.ndarray:
    """0 asleep .. 1 awake: weight off the sink; for silent heads the output relative to reading one token."""
    states = study.states
    if states.silent[row]:
        return np.clip(states.norm[row] / states.reference[row], 0, 1)
    return (1 - np.clip(states.mass[row], 0, 1)).astype(np.float32)
