"""Training speed of the toy models against a straightforward loop that makes its samples one by one.

Run: ``python benchmarks/toy_speed.py``. Both sides run in this process on one thread, in turns, with the same shapes,
batch and optimizer. There are two of them: one writes each sequence with a few whole-array operations, one writes it
token by token. Time is processor time, so that other work on the machine does not count. Writes
``docs/benchmarks/toy_speed.json`` and the table in ``docs/paper.md``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sinklens.normalizers import Softmax
from sinklens.toy import TriggerTask
from sinklens.toy.model import ToyConfig
from sinklens.toy.reports import markdown, put_between
from sinklens.toy.training import TrainSettings, _Loop

CASES = ((1, 1, 6.0), (1, 16, 15.0), (2, 8, 6.0))
"""Size, models trained at once, and the speed-up asked for."""


class PlainHead(nn.Module):
    """One softmax head in the textbook way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        future = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        return self.o(scores.masked_fill(future, float("-inf")).softmax(-1) @ self.v(x))


def plain_sample(n: int, length: int) -> tuple[Tensor, Tensor]:
    """One sequence and its target."""
    x, y = torch.zeros(length, n), torch.zeros(length, n)
    trigger = int(torch.randint(2, length, ()))
    x[0, 0] = 1
    x[1:, 2 : n - 1] = torch.rand(length - 1, n - 3) * 2 - 1
    x[1:, n - 1] = 1
    x[trigger, n - 1], x[trigger, 1] = 0, 1
    y[trigger] = x[1 : trigger + 1].mean(0)
    return x, y


def sample_by_tokens(n: int, length: int) -> tuple[Tensor, Tensor]:
    """The same sequence written token by token."""
    x, y = torch.zeros(length, n), torch.zeros(length, n)
    trigger = int(torch.randint(2, length, ()))
    x[0, 0] = 1
    for i in range(1, length):
        x[i, 2 : n - 1] = torch.rand(n - 3) * 2 - 1
        x[i, 1 if i == trigger else n - 1] = 1
    y[trigger] = x[1 : trigger + 1].mean(0)
    return x, y


def plain_steps(size: int, sample: Callable[[int, int], tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """A training step of the straightforward loop."""
    layers = nn.ModuleList(nn.ModuleList(PlainHead(16) for _ in range(size)) for _ in range(size))
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def step() -> None:
        samples = [sample(16, 16) for _ in range(128)]
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        h = x
        for layer in layers:
            update = sum(head(h) for head in layer)  # type: ignore[attr-defined]
            h = h + update if size > 1 else update
        difference = h - (x + y if size > 1 else y)
        optimizer.zero_grad()
        difference.square().mean().backward()
        optimizer.step()
        float(difference.detach().abs().max())

    return step


def our_steps(size: int, models: int) -> Callable[[], None]:
    """A training step of :func:`sinklens.toy.train`."""
    config = ToyConfig(size, size, 16, 16, 16, residual=size > 1)
    seeds = tuple(range(models))
    loop = _Loop(TriggerTask(), config, Softmax(), TrainSettings(lr=1e-3, tolerance=1e-12), seeds, None)
    return loop._advance


def per_second(steps: Sequence[Callable[[], object]], seconds: float, turns: int = 3) -> list[float]:
    """Steps a second of processor time of each side, by turns; the best turn counts."""
    best = [0.0] * len(steps)
    for _ in range(turns):
        for side, step in enumerate(steps):
            step()
            start, count = time.process_time(), 0
            while time.process_time() - start < seconds / turns:
                step()
                count += 1
            best[side] = max(best[side], count / (time.process_time() - start))
    return best


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--page", type=Path, default=Path("docs/paper.md"))
    parser.add_argument("--seconds", type=float, default=6.0, help="processor time for each side of each row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for size, models, wanted in CASES:
        sides = [plain_steps(size, plain_sample), plain_steps(size, sample_by_tokens), our_steps(size, models)]
        whole, tokens, batched = per_second(sides, arguments.seconds)
        ours = batched * models
        rows.append({"model": f"{size}x{size}", "seeds at once": models, "sinklens, model-steps/s": round(ours, 1),
                     "plain loop, a sequence at a time": round(whole, 1), "times": round(ours / whole, 1),
                     "plain loop, a token at a time": round(tokens, 1), "times ": round(ours / tokens, 1),
                     "asked for": wanted})  # fmt: skip
        print(rows[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "toy_speed.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    put_between(arguments.page, "speed", markdown(rows))


if __name__ == "__main__":
    main()
