"""The factorial of kernel and normalization: trains every cell, writes its table into ``docs/paper.md``.

Run: ``python benchmarks/toy_factorial.py --size 1 --seeds 8`` and ``--size 2 --seeds 4``. An interrupted run goes on
where it stopped; finished cells are not trained again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sinklens.toy import TrainSettings, factorial
from sinklens.toy.reports import put_between


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1, help="layers, and heads a layer")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10_000, help="give up after this many")
    parser.add_argument("--cells", nargs="*", default=None, help="names of cells; all by default")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--work", type=Path, default=Path("runs/toy/factorial"))
    parser.add_argument("--page", type=Path, default=Path("docs/paper.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = TrainSettings(lr=1e-3, max_steps=arguments.steps)
    result = factorial(
        arguments.size, seeds=arguments.seeds, settings=settings, cells=arguments.cells, folder=arguments.work
    )
    result.save(arguments.out / f"toy_factorial_{arguments.size}x{arguments.size}.json")
    put_between(arguments.page, f"factorial-{arguments.size}x{arguments.size}", result.markdown())
    print(result.markdown())


if __name__ == "__main__":
    main()
