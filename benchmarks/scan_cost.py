"""What a scan costs beside its peers: time as a ratio in the same run, peak memory in a fresh process each.

    python benchmarks/scan_cost.py --out docs/benchmarks

Peers: the plain sdpa forward (with logits, and without), ``output_attentions=True`` on eager, and TransformerBridge
``run_with_cache``. All on the demo model in float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sinklens.models import demo_folder, load
from sinklens.observe import record_activity
from sinklens.prompts import PromptSet
from sinklens.scanning import scan

SIZES = [(2, 512), (2, 1024), (2, 2048)]
LONG = (1, 8192)


def make(method: str) -> Callable[[PromptSet], object]:
    """A function that runs one method on a prompt set; everything that is not the run itself happens here."""
    if method == "bridge":
        from transformer_lens.model_bridge import TransformerBridge

        bridge = TransformerBridge.boot_transformers(str(demo_folder()), device="cpu")
        return lambda prompts: bridge.run_with_cache(prompts.tokens)
    model, _ = load("demo", dtype="float32")
    if method == "attentions":
        model.set_attn_implementation("eager")
        return lambda prompts: model(prompts.tokens, output_attentions=True, use_cache=False)
    methods: dict[str, Callable[[PromptSet], object]] = {
        "plain": lambda prompts: model(prompts.tokens, use_cache=False),
        "body": lambda prompts: model.model(prompts.tokens, use_cache=False),
        "mass": lambda prompts: record_activity(model, prompts, outputs=False, locate=False, progress=False),
        "scan": lambda prompts: scan(model, prompts, progress=False),
    }
    return methods[method]


WORDS = {
    "plain": "plain sdpa forward",
    "body": "plain sdpa forward without logits",
    "mass": "sinklens: sink mass of every head and token",
    "scan": "sinklens: whole scan row",
    "attentions": "transformers `output_attentions=True`",
    "bridge": "TransformerBridge `run_with_cache`",
}


def prompts_of(size: tuple[int, int]) -> PromptSet:
    text = "\n".join(passage for passage in _passages())
    _, tokenizer = load("demo")
    ids = tokenizer(text, verbose=False)["input_ids"]
    batch, length = size
    rows = [[tokenizer.bos_token_id, *ids[i * (length - 1) : (i + 1) * (length - 1)]] for i in range(batch)]
    return PromptSet.from_tokens(torch.tensor(rows), tokenizer=tokenizer)


def _passages() -> list[str]:
    from sinklens.prompts import _passages as records

    return [record["text"] for record in records()]


def peak(method: str, size: tuple[int, int]) -> dict[str, float]:
    """Time and extra peak memory of one run, called in a process of its own."""
    prompts = prompts_of(size)
    run = make(method)
    warm = PromptSet.from_tokens(prompts.tokens[:, :64])
    with torch.no_grad():
        run(warm)
        # Loading peaks higher than a small run: start the kernel's high-water mark afresh (Linux).
        Path("/proc/self/clear_refs").write_text("5")
        before = _kib("VmRSS")
        start = time.perf_counter()
        run(prompts)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "gib": (_kib("VmHWM") - before) / 2**20}


def _kib(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def in_fresh_process(method: str, size: tuple[int, int]) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", method, str(size[0]), str(size[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0 and method in ("attentions", "bridge"):
        # Killed for want of memory: a peer that does not fit is a finding, not the end of the benchmark.
        return {"seconds": float("nan"), "gib": float("nan")}
    done.check_returncode()
    return json.loads(done.stdout.strip().splitlines()[-1])


def interleaved(methods: list[str], size: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    """Seconds of each method, in turns, so that a slow moment of the machine meets all of them."""
    prompts = prompts_of(size)
    runs = {method: make(method) for method in methods}
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    with torch.no_grad():
        for run in runs.values():
            run(PromptSet.from_tokens(prompts.tokens[:, :64]))
        for _ in range(rounds):
            for method, run in runs.items():
                start = time.perf_counter()
                run(prompts)
                seconds[method].append(time.perf_counter() - start)
    return seconds


def table(rounds: int, peers: bool) -> list[str]:
    """The rows of the report, printed as they come."""
    lines = ["| size | method | seconds | time ratio | extra peak GiB | memory ratio |", "|---|---|---|---|---|---|"]
    ours = ["plain", "body", "mass", "scan"]
    for size in SIZES:
        seconds = interleaved(ours, size, rounds)
        # The ratio within a round, then the median over rounds: drift of the machine cancels.
        plain = seconds["plain"]
        ratios = {m: sorted(a / b for a, b in zip(seconds[m], plain, strict=True))[rounds // 2] for m in ours}
        memory = {m: in_fresh_process(m, size) for m in [*ours, *(["attentions", "bridge"] if peers else [])]}
        for method, one in memory.items():
            own = sorted(seconds[method])[rounds // 2] if method in seconds else one["seconds"]
            ratio = ratios.get(method, one["seconds"] / memory["plain"]["seconds"])
            cells = (own, ratio, one["gib"], one["gib"] / memory["plain"]["gib"])
            words = " | ".join(f"{cell:.2f}" if cell == cell else "out of memory" for cell in cells)
            lines.append(f"| {size[0]} x {size[1]} | {WORDS[method]} | {words} |")
            print(lines[-1], flush=True)
    long = in_fresh_process("scan", LONG)
    needed = 4 * 30 * 9 * LONG[1] ** 2 / 2**30
    lines.append(
        f"| {LONG[0]} x {LONG[1]} | {WORDS['scan']} | {long['seconds']:.1f} | - | {long['gib']:.2f} | "
        f"all patterns alone would take {needed:.0f} GiB |"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--one", nargs=3)
    arguments = parser.parse_args()
    if arguments.one:
        method, batch, length = arguments.one
        print(json.dumps(peak(method, (int(batch), int(length)))))
        return
    lines = table(arguments.rounds, not arguments.no_peers)
    header = (
        f"SmolLM2-135M, float32, {torch.get_num_threads()} threads, torch {torch.__version__}, Python "
        f"{platform.python_version()}; `python benchmarks/scan_cost.py`. Ratios of time are medians over "
        f"{arguments.rounds} interleaved rounds; peak memory is beyond the loaded model, in a process of its own."
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "scan_cost.md").write_text(header + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
