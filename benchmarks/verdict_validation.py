"""How often a head whose answer is known gets its verdict.

    python -m benchmarks.verdict_validation --count 100 --out docs/validation

Heads are planted in tiny GPT-2s with written weights (``tests/verdict_plants.py``); heads of untrained models must
support nothing.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from scipy.stats import binomtest
from tqdm.auto import tqdm

from tests.verdict_plants import EXPECTED, Kind, verdict

WORDS: dict[Kind, str] = {
    "clean": "sleeps on the first token until a trigger comes",
    "constant": "always parked; its sink's value is a constant that matters",
    "broadcast": "always parked; its sink's value tells which token came first",
    "redundant": "a clean head that exists twice",
    "asleep": "always parked, without a value",
    "graded": "attends to the sink in proportion to a feature",
    "random": "a head of an untrained model",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| plant | right | of | 95 % interval | what else it was called |", "|---|---|---|---|---|"]
    for kind, words in WORDS.items():
        found: Counter[str] = Counter()
        for seed in tqdm(range(arguments.count), desc=kind):
            found[str(verdict(kind, seed).frame.verdict.iloc[0])] += 1
        supports = sum(count for name, count in found.items() if name.startswith("supports"))
        right = sum(found[name] for name in EXPECTED[kind]) if kind in EXPECTED else arguments.count - supports
        interval = binomtest(right, arguments.count).proportion_ci(method="wilson")
        others = [f"{name} {count}" for name, count in found.items() if name not in EXPECTED.get(kind, ())]
        wanted = " or ".join(EXPECTED.get(kind, ("anything but support",)))
        between = f"{interval.low:.2f} to {interval.high:.2f}"
        lines.append(f"| {words}: *{wanted}* | {right} | {arguments.count} | {between} | {', '.join(others) or '-'} |")
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        command = f"python -m benchmarks.verdict_validation --count {arguments.count} --out docs/validation"
        head = f"Made by `{command}`.\n\n"
        (arguments.out / "verdicts.md").write_text("# Verdicts on planted heads\n\n" + head + table, encoding="utf-8")


if __name__ == "__main__":
    main()
