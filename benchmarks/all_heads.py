"""Every head of the demo model: verdicts, their picture, and what is lost when sinks are taken away.

    python benchmarks/all_heads.py --prompts FILE.txt --out docs/benchmarks

Of the first ``--n`` sequences every fourth calibrates and the others test; the ``--held-out`` sequences after them
measure the surgery, and the built-in passages are the text of a second kind. The run keeps a journal in ``--work`` and
goes on from it: about an hour and a half on two cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import sinklens as sl
from sinklens.causal.contrasting import NO_SINK
from sinklens.models import load, prompts_named
from sinklens.observe import every_head
from sinklens.toy.figures import renderer
from sinklens.verify import verified

LENGTH = 128
SHOWN = [
    "z_dormant",
    "z_active",
    "c1_dormant",
    "c1_active",
    "c1m_dormant",
    "c1m_active",
    "log_ratio",
    "dd",
    "c4_dormant",
    "e4",
]


def cell(row: Any, name: str) -> str:
    value, low, high = (getattr(row, key, np.nan) for key in (name, f"{name}_low", f"{name}_high"))
    if value != value:
        return "-"
    digits = 2 if name in ("e4", "log_ratio") else 4
    return f"{value:.{digits}f}" + ("" if low != low else f" [{low:.{digits}f}, {high:.{digits}f}]")


def verdict_table(verdicts: sl.Verdicts, command: str) -> str:
    """All heads with dormant tokens, grouped by verdict; the others counted."""
    frame = verdicts.frame
    counts = frame.verdict.value_counts()
    by_layer = frame[frame.verdict.str.startswith("supports")].groupby("layer").size()
    lines = [
        f"Made by `{command}`.", "", verdicts.reading(), "",
        "Heads that support the hypothesis, by layer: "
        + (", ".join(f"{layer}: {count}" for layer, count in by_layer.items()) or "none") + ".", "",
    ]  # fmt: skip
    for verdict, count in counts.items():
        part = frame[frame.verdict == verdict].sort_values("sink_mass", ascending=False)
        lines += [
            f"## {verdict.capitalize()} ({count})",
            "",
            f"{verdicts.settings['meanings'][verdict].capitalize()}.",
            "",
        ]
        if verdict == "never dormant":
            sinks = part[part.sink_mass > NO_SINK]
            names = ", ".join(f"L{layer}H{head}" for layer, head in zip(sinks.layer, sinks["head"], strict=True))
            lines += [f"Of these, {len(sinks)} put more than {NO_SINK:g} on the sink: {names}.", ""]
            continue
        lines += ["| head | sink mass | dormant | active | " + " | ".join(SHOWN) + " | p (Holm) | why |",
                  "|---" * (len(SHOWN) + 6) + "|"]  # fmt: skip
        for _, row in part.iterrows():
            numbers = " | ".join(cell(row, name) for name in SHOWN)
            p = "-" if row.p_holm != row.p_holm else f"{row.p_holm:.2g}"
            lines.append(f"| L{row.layer}H{row['head']} | {row.sink_mass:.2f} | {row.dormant:.2f} | {row.active:.2f} | "
                         f"{numbers} | {p} | {row.reason} |")  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def curve_table(found: sl.Desinking) -> str:
    """The surgery's curve, and the forms that heads got."""
    forms = found.frame.groupby(["verdict", "form"]).size()
    words = found.settings["forms"]
    lines = [found.reading(), "", "| text | heads changed | loss | change [95 % interval] | change, % | "
             "heads above .3 | mean sink mass | largest residual entry / median |", "|---" * 8 + "|"]  # fmt: skip
    for _, row in found.curve.sort_values(["text", "heads"], kind="stable").iterrows():
        start = found.curve[(found.curve.text == row.text) & (found.curve["heads"] == 0)].iloc[0].loss
        change = f"{row.change:+.4f} [{row.low:+.4f}, {row.high:+.4f}] | {row.change / start:+.2%}"
        lines.append(f"| {row.text} | {row['heads']} | {row.loss:.4f} | {change} | {row.sink_heads} | "
                     f"{row.sink_mass:.3f} | {row.massive:.0f} |")  # fmt: skip
    lines += ["", "| verdict | what stands in | heads |", "|---|---|---|"]
    lines += [f"| {verdict} | {form}: {words[form]} | {count} |" for (verdict, form), count in forms.items()]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", required=True, help="a text file")
    parser.add_argument("--n", type=int, default=22)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--work", type=Path, default=Path("runs/all-heads"))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--figures", type=Path, help="also write the pictures here; needs kaleido")
    options = parser.parse_args()
    for folder in (options.out, options.figures):  # before the long run, not after it
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load("demo", dtype="float32")
    text = prompts_named(options.prompts, model, tokenizer, length=LENGTH, count=options.n + options.held_out)
    tested, rest = text.select(range(options.n)), text.select(range(options.n, len(text)))
    found = sl.contrast(model, tested, every_head(verified(model).sites), interventions=(), judge=True, controls=False,
                        journal=options.work / "contrast.journal.jsonl")  # fmt: skip
    found.save(options.work)
    verdicts = found.verdicts()
    verdicts.save(options.work)
    name = Path(options.prompts).stem
    command = f"python benchmarks/all_heads.py --prompts {Path(options.prompts).name} --n {options.n}"
    table = verdict_table(verdicts, command)
    (options.out / f"all-heads-{name}.md").write_text(f"# Every head of the demo model\n\n{table}", encoding="utf-8")
    print(verdicts.reading())
    scan = sl.scan(model, tested, outputs=False)
    scan.save(options.work)
    surgery = sl.desink(model, scan, found, rest, second=sl.PromptSet.builtin(tokenizer, length=LENGTH, limit=16))
    surgery.save(options.work)
    surgery.recipe().save(options.work / "recipe.json")
    (options.out / f"desinking-{name}.md").write_text(curve_table(surgery), encoding="utf-8")
    draw = renderer()
    if options.figures is not None and draw is not None:
        draw([(verdicts.plot(), options.figures / "verdicts.png"), (surgery.plot(), options.figures / "desinking.png")])
    print(curve_table(surgery), json.dumps(surgery.settings["forms"], indent=2))


if __name__ == "__main__":
    main()
