"""The report: one row a head and direction, ranked by how fully a small named set explains the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from sinklens.errors import InputError
from sinklens.prompts import PromptSet
from sinklens.table import HeadTable
from sinklens.triggers.features import FAMILIES, Feature, TokenTable, tracks, vocabulary
from sinklens.vocabulary import Head, HeadLike, Heads

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from sinklens.triggers.showing import Page

COLUMNS = (
    "layer", "head", "direction", "trigger", "tokens", "dormant_fraction", "auroc", "precision", "recall", "f1",
    "risk_difference", "low", "high", "p_adjusted", "counterfactual", "grade",
)  # fmt: skip
GRADES = ("strict", "graded", "associated", "unconfirmed")
_TEXT = {"direction", "trigger", "tokens", "counterfactual", "grade"}


class TriggerReport(HeadTable):
    """Which heads sleep until which tokens wake them, or park when some come.

    ``frames["members"]`` has one row a feature of a set, ``frames["counterfactual"]`` one an inserted or removed token,
    ``frames["thresholds"]`` the same sets under other thresholds, ``frames["passages"]`` what :meth:`show` shows.
    """

    kind: ClassVar[str] = "triggers"
    units: ClassVar[Mapping[str, str]] = {
        "layer": "index from 0",
        "head": "query head, from 0",
        "direction": "wakes: sleeps until a trigger; parks: awake until a trigger",
        "trigger": "the set in words",
        "tokens": "its commonest tokens",
        "dormant_fraction": "share of tokens with at least half of the weight on the sink, 0..1",
        "auroc": "a trigger token scores above another, probability",
        "precision": "share of trigger tokens in the state, 0..1",
        "recall": "share of the state's tokens that are triggers, 0..1",
        "f1": "0..1",
        "risk_difference": "state at triggers minus elsewhere, by position stratum, -1..1",
        "low": "lower end of its 95 % interval",
        "high": "upper end of its 95 % interval",
        "p_adjusted": "one-sided shift test on CONF, Holm over all sets",
        "counterfactual": "passed, failed, not testable, not run",
        "grade": "strict, graded, associated, unconfirmed",
        "f1_shuffled": "of the set on rotated states",
        "explained": "F1 above f1_shuffled, 0..1",
        "f1_random_tokens": "of random token sets as frequent",
        "output_ratio": "output norm at triggers / elsewhere",
        "insert": "score change, trigger minus control put in, logits",
        "remove": "score change, trigger minus control in its place, logits",
        "insert_state": "change of the state's share by insertion, -1..1",
        "remove_state": "loss of the state's share by removal, -1..1",
        "effective_keys": "exp(entropy) of the content weights, keys",
        "effective_share": "effective keys / content keys in view, 0..1",
        "uniform_divergence": "KL(content weights || uniform), nats",
        "zero_loss": "loss change by silencing, trigger minus matched tokens, nats",
        "mean_loss": "loss change by the mean output, trigger minus matched tokens, nats",
    }

    @classmethod
    def of(cls, frame: pd.DataFrame, settings: Mapping[str, Any], made_from: Mapping[str, Any],
           frames: Mapping[str, pd.DataFrame]) -> TriggerReport:  # fmt: skip
        """Order columns and rows: by grade, then by F1 above that of shuffled labels."""
        rank = frame.grade.map(GRADES.index)
        frame = frame.assign(rank=rank).sort_values(["rank", "explained"], ascending=[True, False], kind="stable")
        rest = [name for name in frame if name not in (*COLUMNS, "rank")]
        return cls(frame[[*COLUMNS, *rest]].reset_index(drop=True), settings, made_from, frames)

    @classmethod
    def empty(cls, settings: Mapping[str, Any], made_from: Mapping[str, Any]) -> TriggerReport:
        """A report without rows; ``settings["why_empty"]`` says why."""
        kinds = {name: "str" if name in _TEXT else "int64" if name in ("layer", "head") else "float64"
                 for name in COLUMNS}  # fmt: skip
        frame = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in kinds.items()})
        return cls(frame, settings, made_from)

    @property
    def confirmed(self) -> pd.DataFrame:
        """The rows that held on the sequences kept for confirmation."""
        return self.frame[self.frame.grade != "unconfirmed"]

    def graded(self, *grades: str) -> Heads:
        """The heads of some grades, best explained first.

        Raises:
            InputError: No such grade.
        """
        if unknown := sorted(set(grades) - set(GRADES)):
            raise InputError("unknown grade", expected=f"some of {', '.join(GRADES)}", got=", ".join(unknown))
        rows = self.frame[self.frame.grade.isin(grades)]
        return Heads.of(Head(int(layer), int(head)) for layer, head in zip(rows.layer, rows["head"], strict=True))

    def marks(
        self, prompts: PromptSet, grades: Sequence[str] = ("strict", "graded"), features: Sequence[Feature] = ()
    ) -> dict[Head, np.ndarray]:
        """Where the tokens stand that wake each head, in any prompts: bool ``[sequence, position]`` by head.

        Args:
            prompts: Any token prompts; a token that does not occur in them marks nothing.
            grades: Heads of which grades.
            features: The caller's own features, if the report was made with any.
        """
        table = TokenTable.of(prompts)
        known = {feature.name: feature for feature in vocabulary(table, [*FAMILIES, *features], 1)}
        wake = self.frame[self.frame.grade.isin(list(grades)) & (self.frame.direction == "wakes")]
        marked = {}
        for layer, head in zip(wake.layer, wake["head"], strict=True):
            members = self.frames["members"]
            mine = members[(members.layer == layer) & (members["head"] == head) & (members.direction == "wakes")]
            found = [known[name] for name in mine.feature if name in known]
            marked[Head(int(layer), int(head))] = np.asarray(tracks(table, found).any(0))
        return marked

    def reading(self) -> str:
        if self.frame.empty:
            return f"No trigger heads: {self.settings['why_empty']}."
        counts = self.frame.grade.value_counts()
        listed = ", ".join(f"{counts.get(grade, 0)} {grade}" for grade in GRADES)
        unchecked = int((self.confirmed.counterfactual == "not run").sum())
        listed += f"; not checked by changing tokens: {unchecked}" if unchecked else ""
        lines = [f"{len(self.frame)} trigger sets at {len(set(self.heads))} heads: {listed}."]
        lines += [f"{sentence(row)}." for _, row in self.confirmed.head(3).iterrows()]
        return " ".join(lines)

    def plot(self) -> Figure:
        """Confirmed heads by trigger: how much more often a head is awake there; see :mod:`sinklens.plots`."""
        from sinklens.plots import trigger_map

        return trigger_map(self)

    def show(self, head: HeadLike, direction: str | None = None) -> Page:
        """Passages with each token coloured by how awake the head is, triggers underlined; works in Jupyter.

        Raises:
            InputError: The head has no confirmed triggers; lists those that have.
        """
        from sinklens.triggers.showing import passages_of

        return passages_of(self, Heads.of([head])[0], direction)


def sentence(row: Any) -> str:
    """One row in words."""
    name = Head(int(row.layer), int(row["head"]))
    usual = f"asleep at {row.dormant_fraction:.0%} of the tokens"
    if row.direction == "parks":
        usual = f"awake at {1 - row.dormant_fraction:.0%} of the tokens"
    return (f"{name}, {usual}, {row.direction} at {row.trigger}: risk difference {row.risk_difference:.2f} "
            f"[{row.low:.2f}, {row.high:.2f}], precision {row.precision:.2f}, recall {row.recall:.2f}")  # fmt: skip
