"""What the normalization test costs: the exact sweep beside naive passes, and screening beside one backward pass.

    python benchmarks/contrast_cost.py --prompts FILE.txt --out docs/benchmarks

The sweep: the core six interventions on one head in each of ``--layers`` layers spread over the depth, reusing the
clean run and not, on the same tokens, taking turns; both must give the same KL. Screening: every head and every
intervention, beside one forward and one backward pass of the same tokens; calibration is timed apart. With ``--judged
DIR`` (what ``all_heads.py`` left in its ``--work``) the rank correlation of screening with exact KL is added.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sinklens as sl
from sinklens.causal import SIX, calibrate, screening
from sinklens.causal.sweep import Variant, sweep
from sinklens.measures import gram
from sinklens.models import load, prompts_named
from sinklens.patch import Patch
from sinklens.verify import verified


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def sweep_cost(model: Any, prompts: sl.PromptSet, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of the reusing sweep over those of the naive one, and the largest difference of their KL."""
    backend, keys = verified(model), sl.SinkKeys()
    depth = len(backend.sites)
    chosen = [sl.Head(int(layer), 0) for layer in np.linspace(0, depth - 1, layers).round()]
    calibrated = calibrate(model, prompts, chosen)
    variants = [
        Variant((str(head), change.id, "everywhere"), sl.Heads([head]),
                Patch.of({head: change.normalizer(calibrated[head])}, keys), change.alter)
        for head in chosen for change in SIX if change.id != "C0"
    ]  # fmt: skip
    grams = {site.layer: gram(backend.output_matrix(site)) for site in backend.sites}

    def kl(reuse: bool) -> dict[tuple[int, tuple[str, ...]], torch.Tensor]:
        parts = sweep(backend, prompts, variants, grams, reuse=reuse, progress=False)
        return {(rows.start, v.name): effects.kl for rows, outcomes in parts for v, effects in outcomes}

    seconds: dict[bool, list[float]] = {True: [], False: []}
    difference = 0.0
    for _ in range(rounds):
        (quick, ours), (naive, theirs) = timed(lambda: kl(True)), timed(lambda: kl(False))
        seconds[True].append(quick)
        seconds[False].append(naive)
        difference = max(difference, max(float((ours[key] - theirs[key]).abs().max()) for key in ours))
    exact, plain = min(seconds[True]), min(seconds[False])
    return {"layers": [head.layer for head in chosen], "variants": len(variants), "sequences": len(prompts),
            "length": prompts.length, "exact_seconds": exact, "naive_seconds": plain, "ratio": exact / plain,
            "largest_difference_of_kl": difference}  # fmt: skip


def screening_cost(model: Any, prompts: sl.PromptSet, calibration: sl.PromptSet, rounds: int) -> dict[str, Any]:
    """Seconds of screening over those of one forward and backward pass, calibration left out of both."""
    real, spent = screening.calibrate, [0.0]

    def watched(*args: Any, **options: Any) -> Any:
        spent[0], result = timed(lambda: real(*args, **options))
        return result

    def backward() -> None:
        for _, tokens, _ in prompts.batches(2):
            inputs = model.get_input_embeddings()(tokens).detach().requires_grad_()
            logs = model(inputs_embeds=inputs, use_cache=False).logits.log_softmax(-1)
            torch.autograd.grad(logs.gather(-1, tokens[..., None]).sum(), inputs)

    screening.calibrate = watched
    try:
        ours, theirs, calibrating = [], [], []
        for _ in range(rounds):
            seconds, found = timed(lambda: sl.screen(model, prompts, calibration=calibration, progress=False))
            ours.append(seconds - spent[0])
            calibrating.append(spent[0])
            theirs.append(timed(backward)[0])
    finally:
        screening.calibrate = real
    return {"heads": len(found.heads), "interventions": len(found.settings["interventions"]),
            "sequences": len(prompts), "length": prompts.length, "screening_seconds": min(ours),
            "forward_backward_seconds": min(theirs), "ratio": min(ours) / min(theirs),
            "calibration_seconds": min(calibrating)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--judged", type=Path, help="folder of a contrast of many heads, for the rank correlation")
    parser.add_argument("--n", type=int, default=22, help="sequences of that contrast")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    options = parser.parse_args()
    model, tokenizer = load("demo", dtype="float32")
    prompts = prompts_named(options.prompts, model, tokenizer, length=128, count=6)
    test, calibration = prompts.select([0, 1, 2, 3]), prompts.select([4, 5])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "sweep": sweep_cost(model, test, options.layers, options.rounds),
        "screening": screening_cost(model, test, calibration, options.rounds),
    }
    if options.judged is not None:
        exact = sl.Contrast.load(options.judged)
        same = prompts_named(options.prompts, model, tokenizer, length=128, count=options.n)
        found = sl.screen(model, same)
        found.save(options.judged)
        result["agreement"] = found.agreement(exact).round(3).to_dict("records")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "contrast_cost.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
