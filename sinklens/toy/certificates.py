"""The theorems of arXiv 2603.11487 read off trained models: what error goes with what sink.

Theorem 1 ties a small error of one softmax head to its weight on BOS in rows off the trigger. A head whose row i puts
``1 - s`` on content writes at least ``(1 - s)`` times the smallest content its values can give, so along training and
over seeds the points (error, 1 - s) must fall together. Theorem 2 says that in a deep softmax model some layer and
some off-trigger row sink. Theorem 3 is construction A.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from sinklens.errors import InputError
from sinklens.toy.measuring import ToyReading, read_task
from sinklens.toy.task import TriggerTask
from sinklens.toy.training import TrainRecord


@dataclass(frozen=True, eq=False)
class Certificate:
    """What a set of trained models says about the theorems.

    Attributes:
        curve: Points along training, all seeds: ``[point, 3]`` of seed, batch error, ``1 - BOS mass off the trigger``.
        correlation: Spearman correlation of the two in the second half of training (by log error); NaN without a sink.
        slope: Exponent p of ``1 - s ~ error^p`` in the same half, by least squares on logs.
        readings: Each final model on fresh sequences.
        sinking: ``[seed, layer, head]``, whether some off-trigger row of the head has at least ``threshold`` on BOS.
        threshold: The mass asked of a row.
    """

    curve: np.ndarray
    correlation: float
    slope: float
    readings: tuple[ToyReading, ...]
    sinking: np.ndarray
    threshold: float

    @property
    def some_layer_sinks(self) -> bool:
        """Theorem 2's claim: in every seed at least one head of one layer sinks in some off-trigger row."""
        return bool(self.sinking.any((1, 2)).all())


def certify(record: TrainRecord, task: TriggerTask | None = None, *, threshold: float = 0.9) -> Certificate:
    """Relate error and sink along training and in the final models.

    Args:
        record: Trained models with their curves.
        task: What they were trained on; the paper's task by default.
        threshold: Mass on BOS from which a row counts as sinking, in (0, 1).

    Raises:
        InputError: A threshold outside (0, 1).
    """
    if not 0 < threshold < 1:
        raise InputError("a mass is a share", expected="0 < threshold < 1", got=threshold)
    readings = tuple(read_task(model, task or TriggerTask()) for model in record.models())
    curve = np.concatenate(
        [
            np.column_stack([np.full(len(rows), seed), rows[:, 2], 1 - rows[:, 3]])
            for seed, rows in record.curves.items()
        ]
    )
    late = curve[curve[:, 1] < np.sqrt(curve[:, 1].max() * curve[:, 1].min())]
    correlation, slope = _relation(late)
    sinking = np.stack([reading.highest_off >= threshold for reading in readings])
    return Certificate(curve, correlation, slope, readings, sinking, threshold)


def _relation(points: np.ndarray) -> tuple[float, float]:
    error, rest = points[:, 1], points[:, 2]
    if len(points) < 3 or np.ptp(rest) == 0 or rest.min() <= 0:
        return float("nan"), float("nan")
    correlation = stats.spearmanr(error, rest).statistic
    return float(correlation), float(stats.linregress(np.log(error), np.log(rest)).slope)
