"""A contrast killed with SIGKILL at random times: does it go on to the same table, bit for bit?

python -m benchmarks.kill_validation --count 10 --out docs/validation
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from tests import killing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draw = np.random.default_rng(options.seed)
    lines = ["| kill | journal when killed, bytes | still running | same table |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        whole = killing.finished(Path(folder) / "whole")
        size = (Path(folder) / "whole/j.jsonl").stat().st_size
        good = 0
        for number in range(options.count):
            place = Path(folder) / str(number)
            alive = killing.killed(place, int(draw.integers(0, size)))
            journal = place / "j.jsonl"
            written = journal.stat().st_size if journal.is_file() else 0
            equal = killing.same(killing.finished(place), whole)
            good += alive and equal
            lines.append(
                f"| {number + 1} | {written} of {size} | {'yes' if alive else 'no'} | {'yes' if equal else 'no'} |"
            )
    command = f"python -m benchmarks.kill_validation --count {options.count} --out docs/validation"
    table = f"Made by `{command}`: {good} of {options.count} killed runs went on to the same table.\n\n" + "\n".join(
        lines
    )
    print(table)
    if options.out is not None:
        (options.out / "kills.md").write_text(f"# Runs that were killed\n\n{table}\n", encoding="utf-8")
    if good < options.count:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
