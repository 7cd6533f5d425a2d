"""The positive control: swaps on the shipped one-layer softmax models, written into ``docs/paper.md``.

Run: ``python benchmarks/toy_control.py``; a few seconds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from sinklens.toy import load_record, swaps
from sinklens.toy.controls import table
from sinklens.toy.reports import put_between


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--page", type=Path, default=Path("docs/paper.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = swaps(load_record("softmax-1x1").models())
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    (arguments.out / "toy_control.json").write_text(content, encoding="utf-8")
    put_between(arguments.page, "control", table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
