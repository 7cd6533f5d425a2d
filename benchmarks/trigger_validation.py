"""Does trigger detection find what is there, and nothing else? 100 planted heads, and 100 studies of every null.

    python benchmarks/trigger_validation.py --out docs/validation

Plants: tiny random GPT-2 and Llama models, four planted heads each, whose weights park them on the BOS id except at one
to three chosen ids. *Noisy plants*: made-up heads that sleep at 90 % of ordinary tokens and wake at 75 % of triggers,
with states that last several tokens. Nulls: states that have nothing to do with the tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats
from tqdm.auto import tqdm

import sinklens as sl
from sinklens.toy.backcopy import BigramBackcopy
from sinklens.triggers.finding import find_triggers
from sinklens.triggers.study import Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import planted
from tests.test_triggers_finding import synthetic

QUICK = Protocol(resamples=1000)
HEADS = 20


def study(model: object, prompts: sl.PromptSet, activity: sl.Activity | None = None, seed: int = 0) -> pd.DataFrame:
    protocol = Protocol(resamples=1000, seed=seed)
    return find_triggers(model, prompts, activity=activity, protocol=protocol, counterfactual=False, reading=False,
                         batch_size=16, progress=False).frame  # fmt: skip


def named(tokens: str) -> set[int]:
    return {int(token.strip("'")) for token in tokens.split(", ") if token.strip("'").isdigit()}


# ---- what is there --------------------------------------------------------------------------------------------------


def plants(models: int) -> dict[str, int]:
    """Four planted heads in each of many models: found, named exactly, and heads found that were not planted."""
    counts = {"planted": 0, "found": 0, "named exactly": 0, "false heads": 0}
    for seed in tqdm(range(models), desc="planted models"):
        rng = np.random.default_rng(seed)
        ids = rng.permutation(np.arange(3, 36))
        sizes = rng.integers(1, 4, size=4)
        places = [(0, 0), (0, 3), (1, 1), (1, 2)]
        chosen = {place: tuple(int(i) for i in part[:size])
                  for place, part, size in zip(places, np.split(ids[:12], 4), sizes, strict=True)}  # fmt: skip
        model = planted.model(("GPT2", "Llama")[seed % 2], chosen, seed=seed)
        frame = study(model, planted.prompts(seed=seed), seed=seed)
        frame = frame[frame.grade != "unconfirmed"]
        found = {(row.layer, row[frame.columns.get_loc("head") + 1]): row.tokens for row in frame.itertuples()
                 if row.direction == "wakes"}  # fmt: skip
        counts["planted"] += len(chosen)
        counts["found"] += sum(place in found for place in chosen)
        counts["named exactly"] += sum(named(found[p]) == set(i) for p, i in chosen.items() if p in found)
        counts["false heads"] += len(set(found) - set(chosen))
    return counts


def chain(seed: int, count: int = 80, length: int = 128) -> sl.PromptSet:
    """Token sequences of a Markov chain: neighbours depend on each other, as in text."""
    task = BigramBackcopy(tokens=40, length=length, concentration=0.2, table_seed=seed)
    return sl.PromptSet.from_tokens(task.sample(count, torch.Generator().manual_seed(seed)).inputs)


def lasting(rng: np.random.Generator, share: np.ndarray, shape: tuple[int, ...], stay: float = 0.6) -> np.ndarray:
    """Random states that last: each token keeps the last state with probability ``stay``; asleep at ``share``."""
    fresh = rng.random(shape) < share
    keep = rng.random(shape) < stay
    made = fresh.copy()
    for t in range(1, shape[-1]):
        made[..., t] = np.where(keep[..., t], made[..., t - 1], fresh[..., t])
    return made


def mass_of(asleep: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    score = np.where(asleep, 2.0, -2.0) + rng.normal(size=asleep.shape)
    return 1 / (1 + np.exp(-score))


def noisy_plants(studies: int) -> dict[str, int]:
    """Made-up heads with one to three trigger ids that wake them at three of four occurrences."""
    counts = {"planted": 0, "found": 0, "a trigger named": 0, "other ids named": 0}
    for seed in tqdm(range(studies), desc="noisy plants"):
        rng, prompts = np.random.default_rng(1000 + seed), chain(1000 + seed)
        tokens = prompts.tokens.numpy()
        common = np.flatnonzero(np.bincount(tokens.ravel()) > 60)
        common = common[common > 0]
        asleep = lasting(rng, np.array(0.9), (HEADS, *tokens.shape))
        ids = [rng.choice(common, size=rng.integers(1, 4), replace=False) for _ in range(HEADS)]
        for head, chosen in enumerate(ids):
            asleep[head] &= ~(np.isin(tokens, chosen) & (rng.random(tokens.shape) < 0.75))
        frame = study(None, prompts, synthetic(mass_of(asleep, rng), prompts), seed)
        frame = frame[(frame.grade != "unconfirmed") & (frame.direction == "wakes")]
        counts["planted"] += HEADS
        counts["found"] += len(frame)
        for head, tokens_named in zip(frame["head"], frame.tokens, strict=True):
            counts["a trigger named"] += bool(named(tokens_named) & set(ids[head].tolist()))
            counts["other ids named"] += bool(named(tokens_named) - set(ids[head].tolist()))
    return counts


# ---- what is not there ----------------------------------------------------------------------------------------------


def unrelated(seed: int) -> pd.DataFrame:
    """States that last, and drift with position; nothing to do with tokens."""
    rng, prompts = np.random.default_rng(seed), chain(seed)
    drift = np.linspace(0.9, 0.4, prompts.length)
    asleep = lasting(rng, drift, (HEADS, *prompts.tokens.shape))
    return study(None, prompts, synthetic(mass_of(asleep, rng), prompts), seed)


def shuffled(seed: int) -> pd.DataFrame:
    """Planted heads whose states are rotated within each sequence, as labels are shuffled."""
    rng, prompts = np.random.default_rng(seed), chain(seed)
    tokens = prompts.tokens.numpy()
    asleep = ~np.stack([np.isin(tokens, rng.choice(np.arange(1, 41), size=3, replace=False)) for _ in range(HEADS)])
    turned = np.stack([np.roll(asleep[:, s], int(rng.integers(9, prompts.length - 9)), -1)
                       for s in range(len(tokens))], 1)  # fmt: skip
    return study(None, prompts, synthetic(mass_of(turned, rng), prompts), seed)


def random_model(seed: int) -> pd.DataFrame:
    """A model as it is initialized: attention is near uniform, and no head sleeps."""
    from tests import tiny

    return study(tiny.causal(("GPT2", "Llama")[seed % 2], seed=seed, gain=1), planted.prompts(seed=seed), seed=seed)


def always_or_never(seed: int) -> pd.DataFrame:
    """Heads that always sleep, and heads that never do."""
    rng, prompts = np.random.default_rng(seed), chain(seed)
    mass = rng.uniform(0, 0.2, size=(HEADS, *prompts.tokens.shape))
    mass[::2] = 1 - mass[::2]
    return study(None, prompts, synthetic(mass, prompts), seed)


def null(make: Callable[[int], pd.DataFrame], runs: int) -> dict[str, object]:
    """How many studies confirm anything, and how many would by the adjusted p-value alone."""
    confirmed = significant = sets = 0
    for seed in tqdm(range(runs), desc=make.__name__):
        frame = make(seed)
        sets += len(frame)
        confirmed += bool((frame.grade != "unconfirmed").any())
        significant += bool((frame.p_adjusted <= QUICK.q).any())
    return {"runs": runs, "runs with a confirmed head": confirmed, "interval": interval(confirmed, runs),
            "runs with an adjusted p <= .05": significant, "interval of p": interval(significant, runs),
            "sets that reached confirmation": sets}  # fmt: skip


def interval(hits: int, of: int) -> list[float]:
    """Clopper-Pearson, 95 %."""
    exact = stats.binomtest(hits, of).proportion_ci(method="exact")
    return [round(float(exact.low), 4), round(float(exact.high), 4)]


def table(result: dict[str, dict[str, object]]) -> str:
    lines = ["# Validation of trigger detection", "", "Made by `python benchmarks/trigger_validation.py`.", ""]
    for name, numbers in result.items():
        lines += [f"## {name}", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in numbers.items()] + [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/validation"))
    parser.add_argument("--runs", type=int, default=100, help="studies of each null; a quarter as many planted models")
    options = parser.parse_args()
    exact, noisy = plants(max(1, options.runs // 4)), noisy_plants(max(1, options.runs // 20))
    result: dict[str, dict[str, object]] = {
        "Planted heads": {**exact, "share found": interval(exact["found"], exact["planted"])},
        "Noisy planted heads": {**noisy, "share found": interval(noisy["found"], noisy["planted"])},
    }
    result |= {(make.__doc__ or "").strip(): null(make, options.runs)
               for make in (unrelated, shuffled, random_model, always_or_never)}  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "triggers.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (options.out / "triggers.md").write_text(table(result), encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
