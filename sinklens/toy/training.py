"""Training many models at once: one autograd graph, every weight with a leading ``model`` axis.

Each model has its own generator for weights and data, so seed 3 trained alone and seed 3 trained among others see the
same numbers. A model that has solved its task leaves the batch, and the rest go on faster.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Generator, Tensor
from tqdm.auto import tqdm

from sinklens.errors import InputError
from sinklens.normalizers import Normalizer, Softmax
from sinklens.toy.model import ToyConfig, ToyTransformer, run

Sources: TypeAlias = "Generator | Sequence[Generator]"


class Batch(Protocol):
    """What training needs of a batch."""

    inputs: Tensor
    at_trigger: Tensor


class Task(Protocol):
    """What training needs of a task."""

    @property
    def width(self) -> int:
        """Width of the inputs, or of the residual stream for token ids."""

    @property
    def length(self) -> int:
        """Sequence length."""

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids, or None for vector inputs."""

    def settings(self) -> dict[str, Any]:
        """What makes two tasks the same."""

    def sample(self, size: int, generator: Sources) -> Any:
        """A batch, with a model axis for several generators."""

    def score(self, prediction: Tensor, batch: Any, *, residual: bool) -> tuple[Tensor, Tensor]:
        """Loss and error, each ``[model]``; training stops when the error falls below the tolerance."""


@dataclass(frozen=True)
class TrainSettings:
    """How to train; the defaults are those of arXiv 2603.11487.

    Attributes:
        lr: Adam's learning rate; None: 1e-3 for one layer, 1e-4 for more.
        betas: Adam's decay rates.
        batch: Sequences a step.
        max_steps: Give up after this many.
        tolerance: Stop when the batch's error falls below it.
        record_every: Steps between points of the curves.
        save_every: Steps between checkpoints, where there is a place for them.
    """

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    batch: int = 128
    max_steps: int = 50_000
    tolerance: float = 5e-3
    record_every: int = 10
    save_every: int = 1000

    def __post_init__(self) -> None:
        if min(self.batch, self.max_steps, self.record_every, self.save_every) < 1:
            raise InputError("training takes steps", expected="batch, steps and intervals >= 1", got=self)
        if not self.tolerance > 0 or (self.lr is not None and not self.lr > 0):
            raise InputError("rates are positive", expected="lr > 0 and tolerance > 0", got=self)


@dataclass(frozen=True, eq=False)
class TrainRecord:
    """Trained models, one a seed, with their curves.

    Attributes:
        config: The models' shape.
        normalizer: Scores to weights.
        seeds: Seed of weights and data.
        steps: Steps taken, ``[model]``.
        solved: Whether the stop criterion was met, ``[model]``.
        error: Error of the last batch, ``[model]``.
        weights: Each weight with a leading model axis.
        curves: By seed: rows of (step, loss, error, BOS mass off the trigger) ``[point, 4]``; the mass is the mean over
            layers, heads and rows from 2 on that are not the trigger.
        settings: Task, training and versions, as plain values.
    """

    config: ToyConfig
    normalizer: Normalizer
    seeds: tuple[int, ...]
    steps: np.ndarray
    solved: np.ndarray
    error: np.ndarray
    weights: dict[str, Tensor] = field(repr=False)
    curves: dict[int, np.ndarray] = field(repr=False)
    settings: dict[str, Any] = field(repr=False)

    def model(self, index: int = 0) -> ToyTransformer:
        """The model of the ``index``-th seed."""
        return ToyTransformer(self.config, self.normalizer, {name: w[index] for name, w in self.weights.items()})

    def models(self) -> list[ToyTransformer]:
        """All of them, in the order of the seeds."""
        return [self.model(index) for index in range(len(self.seeds))]


def train(
    task: Task,
    *,
    normalizer: Normalizer | None = None,
    layers: int = 1,
    heads: int = 1,
    residual: bool | None = None,
    gated: bool = False,
    learned_sink: bool = False,
    seeds: Iterable[int] = (0,),
    settings: TrainSettings | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> TrainRecord:
    """Train one model a seed until each batch's largest error is below the tolerance.

    Args:
        task: What to learn.
        normalizer: Scores to weights; softmax by default.
        layers: Attention layers.
        heads: Heads a layer, each as wide as the model.
        residual: Whether layers add to their input; by default only several layers do, as in the paper.
        gated: Multiply head outputs by a sigmoid gate.
        learned_sink: Give each head a trained exit logit.
        seeds: One model each.
        settings: How to train.
        checkpoint: A file to resume from and to save to.
        progress: Show a bar.

    Raises:
        InputError: No seed or the same one twice; a normalizer without gradient; a checkpoint of other settings.
    """
    settings = settings or TrainSettings()
    settings = replace(settings, lr=settings.lr or (1e-3 if layers == 1 else 1e-4))
    normalizer = normalizer or Softmax()
    with_residual = (layers > 1 or task.vocabulary is not None) if residual is None else residual
    config = ToyConfig(
        layers, heads, task.width, task.width, task.length, with_residual, gated, learned_sink, task.vocabulary
    )
    chosen = tuple(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise InputError("each model has its own seed", expected="one or more different seeds", got=chosen)
    check_trainable(normalizer)
    loop = _Loop(task, config, normalizer, settings, chosen, None if checkpoint is None else Path(checkpoint))
    return loop.finish(progress)


def check_trainable(normalizer: Normalizer) -> None:
    """Refuse a normalizer through which scores cannot learn.

    Raises:
        InputError: The weights do not depend on the scores, or their gradient is not finite.
    """
    generator = Generator().manual_seed(0)
    scores = torch.randn(8, 8, generator=generator).requires_grad_()
    visible = torch.ones(8, 8, dtype=torch.bool).tril()
    weights = normalizer.weights(scores, visible, torch.arange(8) == 0)
    reached = weights.requires_grad
    if reached:
        (weights * torch.randn(8, 8, generator=generator)).sum().backward()
    if not reached or scores.grad is None or not 0 < float(scores.grad.abs().sum()) < float("inf"):
        raise InputError("a normalizer that trains passes a gradient to the scores", expected="a finite gradient that "
                         "is not zero everywhere", got=normalizer)  # fmt: skip


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread inside: the tensors are small, and threads that wait for each other cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Loop:
    """The state of one training run: the active models, their optimizer, and what has been finished."""

    def __init__(
        self,
        task: Task,
        config: ToyConfig,
        normalizer: Normalizer,
        settings: TrainSettings,
        seeds: tuple[int, ...],
        path: Path | None,
    ) -> None:
        self.task, self.config, self.normalizer, self.settings, self.path = task, config, normalizer, settings, path
        self.seeds, self.active, self.step = seeds, list(range(len(seeds))), 0
        self.sources = [Generator().manual_seed(seed) for seed in seeds]
        drawn = [config.initial(source) for source in self.sources]
        self.done = {name: torch.stack([weights[name] for weights in drawn]) for name in drawn[0]}
        self.steps, self.error = np.zeros(len(seeds), dtype=int), np.full(len(seeds), np.inf)
        self.curves: dict[int, list[list[float]]] = {seed: [] for seed in seeds}
        self.about = {
            **task.settings(), "config": asdict(config), "normalizer": repr(normalizer),
            "training": {**asdict(settings), "betas": list(settings.betas)}, "seeds": list(seeds),
            "torch": torch.__version__,
        }  # fmt: skip
        self._start({name: weight.clone() for name, weight in self.done.items()}, None)
        if path is not None and path.exists():
            self._resume(path)

    def _start(self, weights: dict[str, Tensor], moments: dict[str, dict[str, Tensor]] | None) -> None:
        self.live = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        lr = self.settings.lr or 1e-3
        self.optimizer = torch.optim.Adam(list(self.live.values()), lr=lr, betas=self.settings.betas, fused=True)
        for name, state in (moments or {}).items():
            self.optimizer.state[self.live[name]] = state

    def finish(self, progress: bool) -> TrainRecord:
        limit = self.settings.max_steps
        with (
            _one_thread(),
            tqdm(total=limit, initial=self.step, disable=not progress, desc="training", unit="step") as bar,
        ):
            while self.active and self.step < limit:
                self._advance()
                bar.update()
                if self.step % 50 == 0:
                    bar.set_postfix(open=len(self.active), error=f"{self.error.max():.2g}")
                if self.path is not None and self.step % self.settings.save_every == 0:
                    self._save(self.path)
        self._keep_weights(range(len(self.active)))
        if self.path is not None:
            self._save(self.path)
        return self._record()

    def _advance(self) -> None:
        batch = self.task.sample(self.settings.batch, [self.sources[index] for index in self.active])
        prediction, patterns = run(self.live, batch.inputs, self.config, self.normalizer)
        loss, error = self.task.score(prediction, batch, residual=self.config.residual)
        self.error[self.active] = error.numpy()
        solved = (error < self.settings.tolerance).tolist()
        if self.step % self.settings.record_every == 0 or any(solved):
            self._note(loss, error, patterns, batch)
        leave = [i for i, ok in enumerate(solved) if ok]
        self._keep_weights(leave)  # as they were for this batch: a solved model takes no further step
        self.optimizer.zero_grad()
        loss.sum().backward()
        self.optimizer.step()
        self.step += 1
        self._drop(leave)
        self.steps[self.active] = self.step

    def _note(self, loss: Tensor, error: Tensor, patterns: Sequence[Tensor], batch: Batch) -> None:
        mass = off_trigger_mass(patterns, batch.at_trigger)
        for index, row in zip(self.active, torch.stack([loss.detach(), error, mass], -1).tolist(), strict=True):
            self.curves[self.seeds[index]].append([float(self.step), *row])

    def _keep_weights(self, positions: Sequence[int]) -> None:
        for name, weight in self.live.items():
            self.done[name][[self.active[i] for i in positions]] = weight.detach()[list(positions)]

    def _drop(self, positions: Sequence[int]) -> None:
        if not positions:
            return
        keep = [i for i in range(len(self.active)) if i not in positions]
        moments = {name: _rows(self.optimizer.state[weight], keep) for name, weight in self.live.items()}
        self._start({name: weight.detach()[keep] for name, weight in self.live.items()}, moments)
        self.active = [self.active[i] for i in keep]

    def _record(self) -> TrainRecord:
        return TrainRecord(
            self.config, self.normalizer, self.seeds, self.steps.copy(), self.error < self.settings.tolerance,
            self.error.copy(), dict(self.done),
            {seed: np.array(rows).reshape(-1, 4) for seed, rows in self.curves.items()}, self.about,
        )  # fmt: skip

    def _fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:16]

    def _save(self, path: Path) -> None:
        tensors = {f"done.{name}": weight.contiguous() for name, weight in self.done.items()}
        tensors |= {f"live.{name}": weight.detach().contiguous() for name, weight in self.live.items()}
        for name, weight in self.live.items():
            for part, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"adam.{name}.{part}"] = torch.as_tensor(value).clone()
        tensors |= {f"generator.{i}": source.get_state() for i, source in enumerate(self.sources)}
        about = {"about": self.about, "step": self.step, "active": self.active, "steps": self.steps.tolist(),
                 "error": self.error.tolist(), "curves": {str(k): v for k, v in self.curves.items()}}  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        save_file(tensors, unfinished, {"state": json.dumps(about)})
        unfinished.replace(path)

    def _resume(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        differing = sorted(key for key, value in self.about.items() if state["about"].get(key) != value)
        if differing:
            raise InputError(
                f"{path} belongs to another run",
                expected={key: self.about[key] for key in differing},
                got={key: state["about"].get(key) for key in differing},
            )
        self.step, self.active = state["step"], state["active"]
        self.steps, self.error = np.array(state["steps"], dtype=int), np.array(state["error"], dtype=float)
        self.curves = {int(seed): rows for seed, rows in state["curves"].items()}
        self.done = {name: tensors[f"done.{name}"] for name in self.done}
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("adam."):
                _, name, part = key.split(".")
                moments.setdefault(name, {})[part] = value
        self._start({name: tensors[f"live.{name}"] for name in self.live}, moments)
        for i, source in enumerate(self.sources):
            source.set_state(tensors[f"generator.{i}"])


def _rows(state: dict[str, Tensor], keep: Sequence[int]) -> dict[str, Tensor]:
    # Adam's step count is one number for all models: they started together.
    return {name: value[list(keep)] if value.ndim else value for name, value in state.items()}


def off_trigger_mass(patterns: Sequence[Tensor], at_trigger: Tensor) -> Tensor:
    """Mean weight on BOS over layers, heads and the rows from 2 on that are not the trigger, ``[*model]``.

    Rows 0 and 1 are left out: row 0 sees nothing but BOS, and no trigger can stand on row 1.
    """
    mass = torch.stack([pattern.detach()[..., 0] for pattern in patterns]).mean((0, -2))  # [*model, batch, query]
    off = ~at_trigger[..., 2:]
    return (mass[..., 2:] * off).sum((-1, -2)) / off.sum((-1, -2))
