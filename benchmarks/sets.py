"""From single heads to layers to all heads: what dropping every sink at once does.

    python benchmarks/sets.py --prompts FILE.txt --out docs/benchmarks

Sets of the demo model's heads by sink mass, and whole layers, changed together on 16 x 128 tokens that neither the
means nor the ranking have seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sinklens as sl
from sinklens.models import load, prompts_named
from sinklens.observe import every_head
from sinklens.verify import verified

CHANGES = ("C1", "C1m", "C2", "C4raw", "R2", "Z")
LAYERS = (13, 18, 20, 24, 26, 28)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", required=True, help="a text file")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    options = parser.parse_args()
    model, tokenizer = load("demo", dtype="float32")
    text = prompts_named(options.prompts, model, tokenizer, length=128, count=options.n + 6)
    test, calibration = text.select(range(options.n)), text.select(range(options.n, options.n + 6))
    ranked = sl.scan(model, calibration, outputs=False).top(40)
    every = every_head(verified(model).sites)
    sets = {"the loudest": ranked[:1], "the 10 loudest": ranked[:10], "the 40 loudest": ranked[:40], "all 270": every}
    found = sl.contrast(model, test, [], sets=[*sets.values(), *LAYERS], interventions=CHANGES, calibration=calibration,
                        controls=False)  # fmt: skip
    names = [*sets, *(f"layer {layer}" for layer in LAYERS)]
    words = {name: text.partition(":")[0] for name, text in found.settings["interventions"].items()}
    command = f"python benchmarks/sets.py --prompts {Path(options.prompts).name}"
    lines = [f"Made by `{command}`: KL [95 % interval], and loss change, nats a token, over all tokens.", "",
             "| changed together | " + " | ".join(f"{name}: {words[name]}" for name in CHANGES) + " |",
             "|---" * (len(CHANGES) + 1) + "|"]  # fmt: skip
    for name, unit in zip(names, dict.fromkeys(found.frame["heads"]), strict=True):
        effects = found.effects(unit)
        cells = [f"{row.kl:.3f} [{row.kl_low:.3f}, {row.kl_high:.3f}], {row.dloss:+.3f}"
                 for _, row in effects.loc[list(CHANGES)].iterrows()]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    table = "\n".join([*lines, ""])
    print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"sets-{Path(options.prompts).stem}.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
