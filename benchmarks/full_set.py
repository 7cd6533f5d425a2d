"""Every intervention at the 40 loudest sinks of the demo model and at its trigger heads.

    python benchmarks/full_set.py --prompts FILE.txt --out docs/benchmarks

Changes are made everywhere and read at dormant and at active tokens; of the first ``--n`` sequences of 128 tokens every
fourth calibrates and ranks, the others test. The run keeps a journal in ``--work`` and goes on from it: half an hour on
two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

import sinklens as sl
from sinklens.causal import FULL
from sinklens.causal.contrasting import State
from sinklens.models import load, prompts_named

TRIGGER_HEADS = (
    "L14H2,L14H4,L15H0,L15H2,L16H7,L18H1,L19H7,L20H0,L20H8,L22H1,L23H8,L25H3,L25H4,L25H8,L26H2,L26H4,L27H5,L28H6,L29H4"
)
"""Heads whose triggers are graded or strict on the built-in prompts or on WikiText-2; see docs/triggers.md."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", required=True, help="a text file")
    parser.add_argument("--n", type=int, default=12)
    parser.add_argument("--top", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path("runs/full-set"))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load("demo", dtype="float32")
    text = prompts_named(options.prompts, model, tokenizer, length=128, count=options.n)
    calibration = text.select(range(3, options.n, 4))
    test = text.select([index for index in range(options.n) if index % 4 != 3])
    loudest = [str(head) for head in sl.scan(model, calibration, outputs=False).top(options.top)]
    triggers = TRIGGER_HEADS.split(",")
    heads, journal = ",".join(dict.fromkeys([*loudest, *triggers])), options.work / "contrast.journal.jsonl"
    found = sl.contrast(
        model, test, heads, interventions=FULL, calibration=calibration, controls=False, journal=journal
    )
    found.save(options.work)
    command = f"python benchmarks/full_set.py --prompts {Path(options.prompts).name} --n {options.n}"
    of_all = f"KL from the untouched model, nats a token, changes made everywhere, {len(test)} sequences of 128 tokens."
    short = summary(found, {f"{len(loudest)} loudest sinks": loudest, f"{len(triggers)} trigger heads": triggers})
    lines = [f"Made by `{command}`. {of_all}", "", *short]
    print("\n".join(lines))
    for tokens in ("dormant", "active"):
        lines += ["", f"## Each head, {tokens} tokens", "", *table(found, tokens)]
    stem = Path(options.prompts).stem
    (options.out / f"full-set-{stem}.md").write_text(
        "\n".join(["# Every intervention", "", *lines, ""]), encoding="utf-8"
    )


def effects(found: sl.Contrast, tokens: State) -> pd.DataFrame:
    """KL, one row a head and one column an intervention; missing where the head has no such token."""
    frame = pd.DataFrame({str(head): found.effects(str(head), tokens).kl for head in found.heads}).T
    return frame[[change.id for change in FULL[1:]]]  # C0, nothing changed, is a check of the run


def summary(found: sl.Contrast, groups: dict[str, list[str]]) -> list[str]:
    """One row an intervention: the median over each group's heads, on dormant and on active tokens."""
    states: tuple[State, ...] = ("dormant", "active")
    parts = {
        f"{name}, {tokens}": effects(found, tokens).reindex(heads)
        for name, heads in groups.items()
        for tokens in states
    }
    titles = [f"{title}: median ({part.Z.notna().sum()} heads)" for title, part in parts.items()]
    lines = [f"| change | what it is | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for change in FULL[1:]:
        medians = " | ".join(f"{part[change.id].median():.4f}" for part in parts.values())
        lines.append(f"| {change.id} | {change.words} | {medians} |")
    return lines


def table(found: sl.Contrast, tokens: State) -> list[str]:
    frame = effects(found, tokens)
    lines = [f"| head | {' | '.join(frame.columns)} |", "|---" * (frame.shape[1] + 1) + "|"]
    for head, row in frame.iterrows():
        lines.append(f"| {head} | " + " | ".join("-" if value != value else f"{value:.4f}" for value in row) + " |")
    return lines


if __name__ == "__main__":
    main()
