"""The theorems of arXiv 2603.11487 read off trained models: what error goes with what sink.

Theorem 1 ties a small error of one softmax head to its weight on BOS in rows off the trigger. The content coordinate is
1 in each content token, so a row with mass ``s`` on BOS writes ``(1 - s) v`` there, v the head's gain on it, where 0 is
wanted: ``1 - s <= error / v``. A head that solves the task has v near 1, so the missing mass may not exceed the error.
Theorem 2 says that in a deep softmax model some layer and some off-trigger row sink. Theorem 3 is construction A.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinklens.errors import InputError
from sinklens.toy.measuring import ToyReading, read_task
from sinklens.toy.task import TriggerTask
from sinklens.toy.training import TrainRecord


@dataclass(frozen=True, eq=False)
class Certificate:
    """What a set of trained models says about the theorems.

    Attributes:
        curve: Points along training, all seeds: ``[point, 3]`` of seed, batch error, ``1 - BOS mass off the trigger``.
        worst: Largest ``(1 - mass) / error`` of all points; at most about 1 for one softmax head.
        final: The same for the final models on fresh sequences, with the mean mass over heads, ``[seed]``.
        readings: Each final model on fresh sequences.
        sinking: ``[seed, layer, head]``, whether some off-trigger row of the head has at least ``threshold`` on BOS.
        threshold: The mass asked of a row.
    """

    curve: np.ndarray
    worst: float
    final: np.ndarray
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
    final = np.array([(1 - reading.off.mean()) / reading.error for reading in readings])
    sinking = np.stack([reading.highest_off >= threshold for reading in readings])
    return Certificate(curve, float((curve[:, 2] / curve[:, 1]).max()), final, readings, sinking, threshold)
