"""Verdicts on chosen heads of the demo model.

    python benchmarks/verdicts.py --prompts FILE.txt --n 16 --out docs/benchmarks

Every fourth sequence calibrates, the others test. The run keeps a journal in ``--work`` and goes on from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

from sinklens.causal import SIX, contrast
from sinklens.models import load
from sinklens.prompts import PromptSet

HEADS = "L18H8,L25H8,L20H8,L15H0,L25H3,L20H6"
SHOWN = ["z_dormant", "z_active", "c1_dormant", "c1_active", "c1m_dormant", "c4_dormant", "log_ratio", "e4", "p_holm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", default="builtin", help="builtin, or a text file")
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path("runs/verdicts"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    model, tokenizer = load("demo", dtype="float32")
    if arguments.prompts == "builtin":
        prompts = PromptSet.builtin(tokenizer, length=arguments.length, limit=arguments.n)
    else:
        prompts = PromptSet.from_file(arguments.prompts, tokenizer, length=arguments.length, limit=arguments.n)
    name = Path(arguments.prompts).stem
    found = contrast(model, prompts, arguments.heads, interventions=SIX, judge=True, controls=False,
                     journal=arguments.work / f"{name}.jsonl")  # fmt: skip
    verdicts = found.verdicts()
    found.save(arguments.work / name)
    verdicts.save(arguments.work / name)
    lines = ["| head | dormant | active | " + " | ".join(SHOWN) + " | verdict |", "|---" * (len(SHOWN) + 4) + "|"]
    for head, (_, row) in zip(verdicts.heads, verdicts.frame.iterrows(), strict=True):
        numbers = " | ".join(cell(row, column) for column in SHOWN)
        lines.append(f"| {head} | {row.dormant:.2f} | {row.active:.2f} | {numbers} | **{row.verdict}**: {row.reason} |")
    lines += ["", *spill(found.frames["totals"])]
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"verdicts-{name}.md").write_text(table, encoding="utf-8")


def spill(totals: pd.DataFrame) -> list[str]:
    """KL on dormant tokens of changes made everywhere, beside the same made at the dormant tokens only."""
    dormant = totals[(totals.tokens == "dormant") & totals.intervention.isin(["Z", "C1", "C2"])]
    sums = dormant.groupby(["heads", "intervention", "at"], sort=False)[["kl", "count"]].sum()
    mean = (sums.kl / sums["count"]).unstack("at")
    lines = ["| head | change | KL on dormant tokens, made everywhere | made there only |", "|---|---|---|---|"]
    for (head, intervention), row in mean.iterrows():
        there = "-" if row.dormant != row.dormant else f"{row.dormant:.5f}"  # settled before C2's turn came
        lines.append(f"| {head} | {intervention} | {row.everywhere:.5f} | {there} |")
    return lines


def cell(row: object, column: str) -> str:
    value, low, high = (getattr(row, name, float("nan")) for name in (column, f"{column}_low", f"{column}_high"))
    if value != value:
        return "-"
    return f"{value:.4f}" + ("" if low != low else f" [{low:.4f}, {high:.4f}]")


if __name__ == "__main__":
    main()
