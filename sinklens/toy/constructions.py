"""Weights written down by hand that solve the trigger task exactly or within a bound, with and without a sink.

They are the ground truth of the theorems of arXiv 2603.11487: A and B solve the task under ReLU with no weight on BOS;
D solves it under softmax, where error and sink are tied to each other; E and F (not in the paper) show how far the
theorem reaches: with several softmax heads no head must sink off the trigger, and with L heads no row must at all.

Notation of the formulas: rows are outputs, as in ``nn.Linear``; the stored matrices are their transposes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Generator, Tensor

from sinklens.errors import InputError
from sinklens.normalizers import Normalizer, ReLU, Softmax
from sinklens.toy.measuring import ToyReading, read
from sinklens.toy.model import ToyConfig, ToyTransformer
from sinklens.toy.task import TriggerTask

_Entries = dict[tuple[int, int], float]


@dataclass(frozen=True, eq=False)
class Construction:
    """A model with known weights and what is claimed of it.

    Attributes:
        name: Its letter.
        model: The model.
        task: The task it solves.
        bound: The largest error claimed, rounding included.
        claim: The claim in words.
    """

    name: str
    model: ToyTransformer
    task: TriggerTask
    bound: float
    claim: str

    def check(self, size: int = 256, seed: int = 0) -> Check:
        """Measure the model on sequences with every trigger position and compare with the claim."""
        reading = read(self.model, self.task.sample(size, Generator().manual_seed(seed)))
        return Check(self.name, reading, self.bound)


@dataclass(frozen=True, eq=False)
class Check:
    """A construction measured.

    Attributes:
        name: The construction's letter.
        reading: Error and BOS weights.
        bound: The largest error claimed.
    """

    name: str
    reading: ToyReading
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the claim."""
        return self.reading.error <= self.bound


def rounding(task: TriggerTask) -> float:
    """What float32 may add to the error of an exact mean: ``L * 2^-24``, half a unit in the last place a summand."""
    return task.length * 2.0**-24


def relu(task: TriggerTask | None = None) -> Construction:
    """A: one ReLU head, ``W_Q[0,1] = W_K[0,1] = W_K[0,n-1] = 1``, ``W_V = W_O = I``; no weight on BOS in any row.

    Only the trigger's query is nonzero, and it scores 1 on every token but BOS; the count does the averaging.
    """
    task = task or TriggerTask()
    config = _config(task, 1, 1)
    weights = _empty(config)
    _fill_relu(weights, task)
    claim = "exact, BOS weight 0 in every row"
    return Construction("A", _model(config, ReLU.paper(), weights), task, rounding(task), claim)


def relu_deep(layers: int = 2, heads: int = 2, task: TriggerTask | None = None) -> Construction:
    """A in head 0 of layer 0 of a residual model, all other weights 0; no weight on BOS anywhere."""
    task = task or TriggerTask()
    config = _config(task, layers, heads, residual=True)
    weights = _empty(config)
    _fill_relu(weights, task)
    name = f"A {layers}x{heads}"
    claim = "exact, BOS weight 0 in every head"
    return Construction(name, _model(config, ReLU.paper(), weights), task, rounding(task), claim)


def relu_margin(margin: float = 1.0, task: TriggerTask | None = None) -> Construction:
    """B: A with every score off the trigger at exactly ``-margin``, so that it is robust to small perturbations.

    As A, and ``W_Q[1,0] = W_Q[1,n-1] = -g``, ``W_K[0,0] = -g``, ``W_K[1,{0,1,n-1}] = 1``.
    """
    task = task or TriggerTask()
    if not margin > 0:
        raise InputError("a margin is positive", expected="margin > 0", got=margin)
    config, last = _config(task, 1, 1), task.n - 1
    weights = _empty(config)
    _fill_relu(weights, task)
    _put(weights["W_Q"], 0, {(1, 0): -margin, (1, last): -margin})
    _put(weights["W_K"], 0, {(0, 0): -margin, (1, 0): 1.0, (1, 1): 1.0, (1, last): 1.0})
    claim = f"exact, every off-trigger score is -{margin}"
    return Construction("B", _model(config, ReLU.paper(), weights), task, rounding(task), claim)


def softmax_sink(beta: float = 12.0, task: TriggerTask | None = None) -> Construction:
    """D: one softmax head whose error and sink are tied: error <= (L-1) e^-beta, BOS mass e^beta / (e^beta + i).

    ``W_Q[0,{0,n-1}] = beta``, ``W_Q[0,1] = -beta``, ``W_K[0,0] = 1``, ``W_V = I - e0 e0^T``, ``W_O = I``.
    """
    task = task or TriggerTask()
    config = _config(task, 1, 1)
    weights = _empty(config)
    _put(weights["W_Q"], 0, {(0, 0): beta, (0, task.n - 1): beta, (0, 1): -beta})
    _put(weights["W_K"], 0, {(0, 0): 1.0})
    _values(weights, 0, 1.0)
    bound = (task.length - 1) * math.exp(-beta) + rounding(task)
    claim = "error <= (L-1) e^-beta, BOS mass e^beta / (e^beta + i) in row i"
    return Construction("D", _model(config, Softmax(), weights), task, bound, claim)


def softmax_mass(beta: float, row: int) -> float:
    """BOS mass of construction D in an off-trigger row: ``e^beta / (e^beta + row)``."""
    return 1.0 / (1.0 + row * math.exp(-beta))


def softmax_pair(beta: float = 20.0, task: TriggerTask | None = None) -> Construction:
    """E: two softmax heads of opposite value, uniform off the trigger, so that no head sinks there.

    Output-value matrices +V and -V; at the trigger's row the BOS score is -beta in the first head and +beta in the
    second, and 0 in all other rows. The sink has moved to the trigger's row of the second head.
    """
    task = task or TriggerTask()
    config = _config(task, 1, 2)
    weights = _empty(config)
    for head, sign in enumerate((1.0, -1.0)):
        _put(weights["W_Q"], head, {(0, 1): -sign * beta})
        _put(weights["W_K"], head, {(0, 0): 1.0})
        _values(weights, head, sign)
    bound = 2 * (task.length - 1) * math.exp(-beta) + 2 * rounding(task)
    claim = "uniform rows off the trigger; BOS mass 1 at the trigger in the second head"
    return Construction("E", _model(config, Softmax(), weights), task, bound, claim)


def softmax_sinkless(task: TriggerTask | None = None) -> Construction:
    """F: L softmax heads, none with more than uniform mass on BOS in any row; exact over the rationals.

    Head h (h = 1..L) has BOS score ``log t_h`` with ``t_h = h / L`` at the trigger's row, and 0 elsewhere, so its
    weights there are ``1 / (j + t_h)``. The output coefficients solve ``sum_h a_h / (j + t_h) = 1/j`` for every j and
    ``sum_h a_h = 0``. They alternate in sign and explode with L, so float32 holds it for short sequences only.
    """
    task = task or TriggerTask()
    config = _config(task, 1, task.length)
    weights = _empty(config)
    for head, (share, coefficient) in enumerate(zip(*sinkless_coefficients(task.length), strict=True)):
        _put(weights["W_Q"], head, {(0, 1): math.log(share)})
        _put(weights["W_K"], head, {(0, 0): 1.0})
        _values(weights, head, float(coefficient))
    largest = max(abs(float(a)) for a in sinkless_coefficients(task.length)[1])
    bound = task.length * largest * 1e-6
    claim = "exact over the rationals, at most uniform mass on BOS in every row"
    return Construction("F", _model(config, Softmax(), weights), task, bound, claim)


def sinkless_coefficients(length: int) -> tuple[list[Fraction], list[Fraction]]:
    """The BOS factors ``t_h`` and output coefficients ``a_h`` of construction F, exact."""
    shares = [Fraction(h, length) for h in range(1, length + 1)]
    rows = [[1 / (j + t) for t in shares] + [Fraction(1, j)] for j in range(1, length)]
    rows.append([Fraction(1)] * length + [Fraction(0)])
    return shares, _solve(rows)


def sinkless_is_exact(length: int) -> bool:
    """Check construction F over the rationals: the output coefficient of every row, and BOS at most uniform.

    The output of row i is ``c_i * sum of its tokens``, with ``c_i = sum_h a_h w_h``; off the trigger ``w_h`` is
    ``1/(i+1)`` in every head, at the trigger ``1/(j+t_h)``.
    """
    shares, coefficients = sinkless_coefficients(length)
    silent = all(sum(a / (i + 1) for a in coefficients) == 0 for i in range(1, length))
    at_trigger = all(
        sum(a / (j + t) for a, t in zip(coefficients, shares, strict=True)) == Fraction(1, j) for j in range(2, length)
    )
    no_sink = all(t / (j + t) <= Fraction(1, j + 1) for t in shares for j in range(2, length))
    return silent and at_trigger and no_sink


def _solve(rows: list[list[Fraction]]) -> list[Fraction]:
    """Gauss-Jordan elimination of an augmented square system over the rationals."""
    size = len(rows)
    for column in range(size):
        pivot = next(r for r in range(column, size) if rows[r][column] != 0)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column][column]
        rows[column] = [value / head for value in rows[column]]
        for r in range(size):
            if r != column and (factor := rows[r][column]) != 0:
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[column], strict=True)]
    return [row[-1] for row in rows]


def everything(task: TriggerTask | None = None) -> list[Construction]:
    """All constructions that float32 can hold at the task's length."""
    return [
        relu(task), relu_deep(2, 2, task), relu_deep(4, 4, task), relu_margin(1.0, task), softmax_sink(12.0, task),
        softmax_pair(20.0, task),
    ]  # fmt: skip


def _config(task: TriggerTask, layers: int, heads: int, *, residual: bool = False) -> ToyConfig:
    if not task.include_trigger:
        raise InputError("the constructions average the trigger too", expected="include_trigger=True", got=False)
    return ToyConfig(layers, heads, task.n, task.n, task.length, residual)


def _empty(config: ToyConfig) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in config.shapes().items()}


def _put(matrices: Tensor, head: int, entries: _Entries) -> None:
    for (row, column), value in entries.items():
        matrices[0, head, column, row] = value


def _values(weights: dict[str, Tensor], head: int, factor: float) -> None:
    width = weights["W_V"].shape[-1]
    weights["W_V"][0, head] = torch.eye(width)
    weights["W_V"][0, head, 0, 0] = 0.0
    weights["W_O"][0, head] = factor * torch.eye(width)


def _fill_relu(weights: dict[str, Tensor], task: TriggerTask) -> None:
    _put(weights["W_Q"], 0, {(0, 1): 1.0})
    _put(weights["W_K"], 0, {(0, 1): 1.0, (0, task.n - 1): 1.0})
    weights["W_V"][0, 0] = weights["W_O"][0, 0] = torch.eye(task.n)


def _model(config: ToyConfig, normalizer: Normalizer, weights: dict[str, Tensor]) -> ToyTransformer:
    return ToyTransformer(config, normalizer, weights)
