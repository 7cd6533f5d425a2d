"""What an awake head does: what it reads, and whether the model's predictions need it there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from sinklens.causal import calibrate
from sinklens.errors import InputError
from sinklens.normalizers import Constant
from sinklens.observe import attention_patterns, next_token_losses
from sinklens.patch import patched
from sinklens.triggers.features import CLASSES
from sinklens.triggers.statistics import cluster_interval
from sinklens.triggers.study import Case, Study
from sinklens.verify import verified
from sinklens.vocabulary import Head, Heads

READ, ABLATED = 8, 16
"""Sequences of CONF from which patterns are read, and on which heads are ablated."""
BANDS = 4
_PATTERN_BYTES = 2**28


# ---- what it reads --------------------------------------------------------------------------------------------------


def what_it_reads(model: object, study: Study, cases: Sequence[Case], *, batch_size: int = 2) -> pd.DataFrame:
    """How an awake head spreads its content weight: means over awake tokens of 8 sequences of CONF.

    With p the weights on content keys (the sink left out), renormalized: ``effective_keys = exp(H(p))``,
    ``uniform_divergence = log n - H(p)``, and the shares of p on the previous token, the token itself, tokens that
    followed an earlier copy of the attending token (induction), and punctuation or newlines (delimiters); beside the
    last two the share of such keys among all in view, which is what a uniform mean would put there.
    """
    picks = study.conf[_spread(len(study.conf), READ)]
    prompts = study.prompts.select(torch.tensor(picks))
    size = max(1, _PATTERN_BYTES // (4 * len(picks) * prompts.length**2))
    heads = Heads.of(dict.fromkeys(case.head for case in cases))
    keys, real = sink_columns(study)[picks], prompts.mask.numpy()
    codes = study.table.codes[picks]
    delimiter = study.table.where(lambda text: CLASSES["punctuation"](text) or CLASSES["newline"](text))[picks]
    found: dict[Any, dict[str, Any]] = {}
    for start in range(0, len(heads), size):
        patterns = attention_patterns(model, prompts, heads[start : start + size], batch_size=batch_size)
        for head, pattern in patterns.items():
            row = study.states.heads.index(head)
            awake = study.states.counted[picks] & ~study.states.asleep[row][picks]
            content = pattern.numpy() * (~keys & real)[:, None]
            found[head] = _read(content, awake, codes, delimiter, keys | ~real, study.causal)
    return pd.DataFrame([{**case.key, **found[case.head]} for case in cases])


def _read(content: np.ndarray, awake: np.ndarray, codes: np.ndarray, delimiter: np.ndarray, hidden: np.ndarray,
          causal: bool) -> dict[str, Any]:  # fmt: skip
    sequences, queries = np.nonzero(awake)
    if not len(sequences):
        return {"reads": "never awake here"}
    p = content[sequences, queries]  # [row, key]
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-30)
    positions = np.arange(p.shape[1])
    visible = ~hidden[sequences] & ((positions <= queries[:, None]) | (not causal))
    n = visible.sum(-1)
    entropy = -(p * np.log(np.maximum(p, 1e-30))).sum(-1)
    before = np.roll(codes, 1, -1)
    before[:, 0] = -1
    followed = (before[sequences] == codes[sequences, queries][:, None]) & (positions < queries[:, None])
    rows = np.arange(len(p))
    numbers = {
        "effective_keys": np.exp(entropy), "effective_share": np.exp(entropy) / np.maximum(n, 1),
        "uniform_divergence": np.log(np.maximum(n, 1)) - entropy,
        "previous_share": p[rows, np.maximum(queries - 1, 0)], "self_share": p[rows, queries],
        "induction_share": (p * followed).sum(-1), "delimiter_share": (p * delimiter[sequences]).sum(-1),
        "induction_in_view": (followed & visible).sum(-1) / np.maximum(n, 1),
        "delimiters_in_view": (delimiter[sequences] & visible).sum(-1) / np.maximum(n, 1),
    }  # fmt: skip
    means = {name: float(values.mean()) for name, values in numbers.items()}
    return {"reads": _in_words(means), **means}


_KINDS = {"previous_share": "previous token", "self_share": "itself", "induction_share": "induction",
          "delimiter_share": "delimiters"}  # fmt: skip
_IN_VIEW = {"induction_share": "induction_in_view", "delimiter_share": "delimiters_in_view"}


def _in_words(means: dict[str, float]) -> str:
    best = max(_KINDS, key=lambda name: means[name])
    # Where most keys are of a kind, as with the labels of the toy task, half of the weight says nothing.
    if means[best] >= 0.5 and means[best] >= 1.5 * means.get(_IN_VIEW.get(best, ""), 0.0):
        return _KINDS[best]
    return "near uniform" if means["effective_share"] >= 0.5 else "selected tokens"


def sink_columns(study: Study) -> np.ndarray:
    """Which positions are sink keys, bool ``[sequence, position]``."""
    keys, starts = study.activity.sink_keys, study.prompts.starts
    offsets = torch.arange(keys.first)[None] if keys.positions is None else keys.positions.flatten(1)
    places = (starts[:, None] + offsets).clamp(max=study.prompts.length - 1)
    made = torch.zeros(study.prompts.mask.shape, dtype=torch.bool)
    return made.scatter(1, places.expand(len(starts), -1), True).numpy()


def _spread(size: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))


# ---- whether it is needed -------------------------------------------------------------------------------------------


def what_it_does(model: object, study: Study, cases: Sequence[Case], *, batch_size: int = 2, progress: bool = True
                 ) -> pd.DataFrame:  # fmt: skip
    """Loss change at trigger tokens minus other tokens as frequent, with the head silenced, or at its mean output.

    ``sum_b n_b (mean trigger_b - mean other_b) / sum_b n_b`` over bands b of token frequency with n_b trigger tokens;
    positive: predictions at triggers need the head more. Intervals over sequences.

    Raises:
        InputError: The prompts have no token ids, so there is no loss.
    """
    if study.prompts.tokens.ndim != 2:
        raise InputError("a loss needs tokens to predict", expected="prompts of token ids", got="vectors")
    verified(model)
    picks, calibration = (half[_spread(len(half), ABLATED)] for half in (study.conf, study.disc))
    prompts = study.prompts.select(torch.tensor(picks))
    heads = Heads.of(dict.fromkeys(case.head for case in cases))
    means = calibrate(model, study.prompts.select(torch.tensor(calibration)), heads, fit=False,
                      skip_rows=study.protocol.skip_rows, batch_size=batch_size)  # fmt: skip
    clean = next_token_losses(model, prompts, batch_size=batch_size)
    table = pd.DataFrame([case.key for case in cases])
    change: dict[tuple[str, Head], np.ndarray] = {}
    for head in tqdm(heads, desc="ablating", unit="head", disable=not progress):
        for kind, put in (("zero", Constant()), ("mean", Constant(means[head].output))):
            with patched(model, put, [head]):
                change[kind, head] = next_token_losses(model, prompts, batch_size=batch_size) - clean
    for kind in ("zero", "mean"):
        sums = np.stack([_by_band(study, picks, case, change[kind, case.head]) for case in cases], 1)
        numbers = cluster_interval(sums, _matched, resamples=study.protocol.resamples, rng=study.rng(6))
        for suffix, values in zip(("", "_low", "_high"), numbers, strict=True):
            table[f"{kind}_loss{suffix}"] = values
    return table


def _by_band(study: Study, picks: np.ndarray, case: Case, change: np.ndarray) -> np.ndarray:
    """Sums and counts at triggers and elsewhere by frequency band, ``[sequence, band, 4]``."""
    counts, codes = study.table.counts(), study.table.codes[picks]
    counted = study.states.counted[picks].copy()
    counted[:, :-1] &= counted[:, 1:]  # the last token predicts nothing
    counted[:, -1] = False
    trigger = case.union[picks] & counted
    frequency = np.append(counts, 0)[codes]
    edges = np.quantile(frequency[trigger], np.arange(1, BANDS) / BANDS) if trigger.any() else np.zeros(BANDS - 1)
    band = np.digitize(frequency, edges)
    parts = [[(change * here).sum(-1), here.sum(-1)] for b in range(BANDS)
             for here in (trigger & (band == b), ~trigger & counted & (band == b))]  # fmt: skip
    return np.array(parts).transpose(2, 0, 1).reshape(len(picks), BANDS, 4)


def _matched(sums: np.ndarray) -> np.ndarray:
    """Difference of means in each band, weighted by its trigger tokens; bands without both kinds are left out."""
    at, n_at, other, n_other = (sums[..., i] for i in range(4))
    weight = n_at * (n_other > 0)
    difference = at / np.maximum(n_at, 1) - other / np.maximum(n_other, 1)
    total = weight.sum(-1)
    return np.where(total > 0, (weight * difference).sum(-1) / np.maximum(total, 1), np.nan)
