"""What trigger detection costs: the activity pass beside a plain forward, and the statistics alone.

    python benchmarks/trigger_cost.py --out docs/benchmarks

The statistics run on made-up states of 270 heads (the demo model's number) and more, on 128 sequences of 256 tokens
drawn from a Zipf law, with all features and 2000 draws; each size in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import sinklens as sl
from sinklens.triggers.finding import find_triggers

SEQUENCES, LENGTH = 128, 256


def text() -> sl.PromptSet:
    """Zipf tokens, a newline now and then, BOS first."""
    rng = np.random.default_rng(0)
    chances = 1 / np.arange(1, 5001)
    tokens = rng.choice(5000, size=(SEQUENCES, LENGTH), p=chances / chances.sum()) + 3
    tokens[:, 0] = 1
    return sl.PromptSet.from_tokens(torch.tensor(tokens))


def recording(heads: int, prompts: sl.PromptSet) -> sl.Activity:
    """Heads that sleep at 80 % of the tokens, half of them awake at a few ids of their own."""
    rng = np.random.default_rng(1)
    tokens = prompts.tokens.numpy()
    asleep = rng.random((heads, *tokens.shape), dtype=np.float32) < 0.8
    for head in range(0, heads, 2):
        asleep[head] &= ~np.isin(tokens, rng.integers(3, 60, size=2))
    score = np.where(asleep, 2.0, -2.0) + rng.normal(size=asleep.shape)
    mass = (1 / (1 + np.exp(-score))).astype(np.float32)
    names = ("first_four", "located_mass", "located_position", "entropy", "row_sum", "value_norm", "value_ratio")
    numbers = {name: np.ones((heads, len(tokens))) for name in names} | {
        "row_sum_error": np.zeros((heads, len(tokens)))
    }
    uniform = np.broadcast_to(1 / np.arange(1, LENGTH + 1), (1, *tokens.shape)).astype(np.float32)
    site = sl.Site(0, "made", "causal", heads, heads)
    return sl.Activity(prompts, (site,), sl.SinkKeys(), mass, 1 - mass, uniform, numbers)


def statistics(heads: int) -> dict[str, float]:
    """Seconds and peak memory of everything but the model, in this process."""
    prompts = text()
    made = recording(heads, prompts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    found = find_triggers(None, prompts, activity=made, counterfactual=False, reading=False, progress=False)
    return {"heads": heads, "features": found.settings["features"], "tokens": found.settings["counted_tokens"],
            "seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "before_gib": before / 2**20,
            "sets": len(found.frame)}  # fmt: skip


def activity_pass(batch: int, length: int, repeats: int = 3) -> dict[str, float]:
    """Activity pass over plain forward, processor time, fastest of several, taking turns."""
    from sinklens.models import load

    model, tokenizer = load("demo", dtype="float32")
    prompts = sl.PromptSet.random(len(tokenizer), count=batch, length=length, bos=tokenizer.bos_token_id)
    sl.record_activity(model, prompts, batch_size=batch, progress=False)
    seconds: dict[str, list[float]] = {"plain": [], "activity": []}
    for _ in range(repeats):
        for name, run in (
            ("plain", lambda: model(prompts.tokens, use_cache=False)),
            ("activity", lambda: sl.record_activity(model, prompts, batch_size=batch, progress=False)),
        ):
            # Processor time: other programs on the machine do not count.
            start = time.process_time()
            with torch.inference_mode():
                run()
            seconds[name].append(time.process_time() - start)
    plain, watched = min(seconds["plain"]), min(seconds["activity"])
    return {"batch": batch, "length": length, "plain_cpu_seconds": plain, "activity_cpu_seconds": watched,
            "ratio": watched / plain}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--heads", type=int, nargs="*", default=[270, 1000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(statistics(options.one)))
        return
    sizes = [json.loads(subprocess.run([sys.executable, __file__, "--one", str(heads)], check=True, text=True,
                                       capture_output=True).stdout) for heads in options.heads]  # fmt: skip
    result = {"machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
              "statistics": sizes, "activity": [activity_pass(8, 256), activity_pass(2, 2048)]}  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "triggers.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
