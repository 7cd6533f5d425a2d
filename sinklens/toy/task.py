"""The trigger task of arXiv 2603.11487: say nothing, until one token asks for the mean of all before it.

Positions run 0..L-1. ``x_0`` is BOS, the unit vector ``e_0``. Coordinate 1 marks the one trigger, coordinate n-1 marks
content, and coordinates 2..n-2 are uniform on (-1, 1) everywhere but at BOS. The target is zero at every position but
the trigger ``j``, where it is the mean of ``x_1 .. x_j``. A head that solves this must know when to be silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from sinklens.errors import InputError


@dataclass(frozen=True, eq=False)
class TriggerBatch:
    """Sequences of the trigger task; ``model`` is a leading axis where many models are trained at once.

    Attributes:
        inputs: ``[*model, batch, pos, n]``.
        targets: ``[*model, batch, pos, n]``, without a residual stream.
        trigger: Position of the trigger, ``[*model, batch]``.
    """

    inputs: Tensor
    targets: Tensor
    trigger: Tensor

    @property
    def at_trigger(self) -> Tensor:
        """True at the trigger, ``[*model, batch, pos]``."""
        return torch.arange(self.inputs.shape[-2]) == self.trigger[..., None]

    def labels(self) -> tuple[tuple[str, ...], ...]:
        """A word for each position, ``BOS``, ``content`` or ``trigger``, for :meth:`PromptSet.from_inputs`."""
        words = [["BOS"] + ["content"] * (self.inputs.shape[-2] - 1) for _ in self.trigger]
        for row, position in zip(words, self.trigger.tolist(), strict=True):
            row[position] = "trigger"
        return tuple(map(tuple, words))


@dataclass(frozen=True)
class TriggerTask:
    """Mean of the tokens so far, at the trigger only: ``y_j = (1/j) sum_{m=1..j} x_m``, and 0 elsewhere.

    Attributes:
        n: Width of a token, at least 4; the paper has 16.
        length: Sequence length L, at least 4; the paper has 16.
        include_trigger: Whether the trigger itself is averaged (the authors' code and body), or only the tokens
            between BOS and trigger (the abstract's words).
        triggers: First and last possible trigger position, uniform in between; None for 2..L-1.
    """

    n: int = 16
    length: int = 16
    include_trigger: bool = True
    triggers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.n < 4:
            raise InputError("a token has BOS, trigger, value and content coordinates", expected="n >= 4", got=self.n)
        if self.length < 4:
            raise InputError("a sequence holds BOS, content and a trigger", expected="length >= 4", got=self.length)
        first, last = self.trigger_range
        if not 2 <= first <= last <= self.length - 1:
            raise InputError(
                "the trigger follows BOS and one content token",
                expected=f"2 <= first <= last <= {self.length - 1}",
                got=self.triggers,
            )

    @property
    def trigger_range(self) -> tuple[int, int]:
        """First and last possible trigger position."""
        return self.triggers or (2, self.length - 1)

    @property
    def width(self) -> int:
        """Width of the model's inputs."""
        return self.n

    @property
    def vocabulary(self) -> None:
        """This task has no token ids."""
        return None

    def settings(self) -> dict[str, Any]:
        """What makes two tasks the same, as plain values."""
        return {"task": type(self).__name__, **asdict(self), "triggers": list(self.trigger_range)}

    def sample(
        self, size: int, generator: Generator | Sequence[Generator], *, trigger: int | None = None
    ) -> TriggerBatch:
        """Draw sequences.

        Args:
            size: Sequences (for each model).
            generator: One generator, or one for each of several models, whose data are then independent of the others.
            trigger: Fix the trigger's position, as in the paper's figures.

        Returns:
            The batch, with a leading model axis for several generators.

        Raises:
            InputError: A fixed trigger outside 2..L-1.
        """
        if trigger is not None and not 2 <= trigger < self.length:
            raise InputError("the trigger is out of range", expected=f"2..{self.length - 1}", got=trigger)
        several = not isinstance(generator, Generator)
        sources = generator if several else (generator,)
        drawn = [self._draw(size, source, trigger) for source in sources]  # type: ignore[arg-type, union-attr]
        values, position = (torch.stack(part) if several else part[0] for part in zip(*drawn, strict=True))
        return self._assemble(values, position)

    def _draw(self, size: int, source: Generator, trigger: int | None) -> tuple[Tensor, Tensor]:
        first, last = self.trigger_range if trigger is None else (trigger, trigger)
        position = torch.randint(first, last + 1, (size,), generator=source)
        return torch.rand(size, self.length - 1, self.n - 3, generator=source), position

    def _assemble(self, values: Tensor, position: Tensor) -> TriggerBatch:
        inputs = values.new_zeros(*values.shape[:-2], self.length, self.n)  # [*model, batch, pos, n]
        inputs[..., 0, 0] = 1.0
        torch.sub(values * 2, 1.0, out=inputs[..., 1:, 2:-1])
        inputs[..., 1:, -1] = 1.0
        is_trigger = torch.arange(self.length) == position[..., None]  # [*model, batch, pos]
        inputs[..., 1], inputs[..., -1] = is_trigger, inputs[..., -1] * ~is_trigger
        # The sum over 1..j (or 1..j-1) as one masked row times the tokens.
        last = position if self.include_trigger else position - 1
        averaged = (torch.arange(self.length) <= last[..., None]).float() / last[..., None]
        averaged[..., 0] = 0.0
        mean = averaged[..., None, :] @ inputs  # [*model, batch, 1, n]
        return TriggerBatch(inputs, is_trigger[..., None] * mean, position)

    def score(self, prediction: Tensor, batch: TriggerBatch, *, residual: bool) -> tuple[Tensor, Tensor]:
        """Mean squared error and largest absolute error, each ``[*model]``; a residual stream carries ``x`` as well."""
        wanted = batch.targets + batch.inputs if residual else batch.targets
        difference = prediction - wanted
        return difference.square().mean((-3, -2, -1)), difference.detach().abs().amax((-3, -2, -1))

    def dataset(self, seed: int = 0, *, batch: int = 128) -> Any:
        """The task as an endless ``datasets.IterableDataset`` of single sequences, the same for the same seed."""
        from datasets import IterableDataset

        return IterableDataset.from_generator(_rows, gen_kwargs={"task": self, "seed": seed, "batch": batch})


def _rows(task: TriggerTask, seed: int, batch: int) -> Iterator[dict[str, Any]]:
    generator = Generator().manual_seed(seed)
    while True:
        part = task.sample(batch, generator)
        for inputs, targets, trigger in zip(part.inputs, part.targets, part.trigger, strict=True):
            yield {"inputs": inputs.numpy(), "targets": targets.numpy(), "trigger": int(trigger)}
