"""Scan: which heads of a model park their weight, where, how much, and what they then write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from sinklens.errors import InputError
from sinklens.measures import SinkRule
from sinklens.observe import Activity, record_activity
from sinklens.prompts import PromptSet
from sinklens.table import HeadTable, provenance
from sinklens.vocabulary import Head, Heads, SinkKeys

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DORMANT_MASS, DORMANT_RATIO = 0.9, 0.25
"""A token is dormant at a head if at least .9 of its weight lies on the sink and the head writes at most .25 of what
reading one average content token would write. (Measured against its own RMS, a head that always sleeps never would.)"""


class SinkScan(HeadTable):
    """What a scan found: one row a head; ``frames["sequences"]`` holds the sink mass of every sequence.

    ``frames["passages"]`` has one row a token of the first sequences and one column a head: its weight on the sink.
    """

    kind: ClassVar[str] = "scan"
    units: ClassVar[Mapping[str, str]] = {
        "layer": "index from 0",
        "head": "query head, from 0",
        "kv_head": "key/value head, from 0",
        "sink_mass": "mean weight on the sink, 0..1",
        "sink_rate": "share of sequences above eps, 0..1",
        "uniform_mass": "sink mass of uniform attention, 0..1",
        "boost": "sink mass / uniform mass",
        "sink_position": "most common located position, from the sequence's start",
        "sink_token": "token there, most common",
        "located_mass": "mean weight on the located key, 0..1",
        "located_share": "share of sequences located there, 0..1",
        "first_four_mass": "mean weight on the first 4 tokens, 0..1",
        "dormant_fraction": "share of tokens dormant, 0..1",
        "entropy": "nats, mean over sampled rows",
        "value_ratio": "|W_O v_sink| / mean |W_O v_other|",
        "output_norm": "RMS of the head's output after W_O",
        "row_sum": "mean row sum of the weights",
        "max_row_sum_error": "largest |row sum - 1| over sampled rows",
    }

    def sinks(self, min_mass: float = 0.5, *, min_boost: float = 2.0) -> Heads:
        """Heads that put at least ``min_mass`` on the sink or on the located key, strongest first.

        A head must also exceed uniform attention ``min_boost`` times: on short prompts uniform attention alone puts
        much on every key. A key other than the sink counts only if it was located in most sequences.
        """
        if not 0 < min_mass <= 1:
            raise InputError("a mass threshold lies between 0 and 1", expected="0 < min_mass <= 1", got=min_mass)
        elsewhere = self.frame.located_mass.where(self.frame.located_share > 0.5, 0.0)
        strength = self.frame.sink_mass.where(self.frame.sink_mass >= elsewhere, elsewhere)
        chosen = (strength >= min_mass) & (strength >= min_boost * self.frame.uniform_mass)
        return self._ranked(strength[chosen])

    def top(self, count: int) -> Heads:
        """The heads with the most mass on the sink, strongest first."""
        if count < 1:
            raise InputError("a selection holds at least one head", expected="top of 1 or more", got=count)
        return Heads(self._ranked(self.frame.sink_mass)[:count])

    def _ranked(self, strength: pd.Series) -> Heads:
        rows = self.frame.loc[strength.sort_values(ascending=False, kind="stable").index]
        return Heads(Head(int(layer), int(head)) for layer, head in zip(rows.layer, rows["head"], strict=True))

    @property
    def model_sink_rate(self) -> float:
        """Gu et al.'s number for the model: sink rate averaged over sequences, layers and heads."""
        return float(self.frame.sink_rate.mean())

    def reading(self) -> str:
        eps = self.settings["rule"]["eps"]
        many = int((self.frame.sink_mass > eps).sum())
        where = Counter(zip(self.frame.sink_position, self.frame.sink_token, strict=True)).most_common(1)[0][0]
        return (
            f"{many} of {len(self.frame)} heads put more than {eps:g} of their weight on {self.settings['sink_keys']}; "
            f"the sink is most often located at position {where[0]}, {where[1]!r}."
        )

    def preview(self) -> pd.DataFrame:
        """The strongest sinks first, with the columns that matter most."""
        columns = ["layer", "head", "kv_head", "sink_mass", "boost", "sink_position", "sink_token", "dormant_fraction",
                   "value_ratio"]  # fmt: skip
        return self.frame.sort_values("sink_mass", ascending=False)[columns]

    def plot(self, column: str = "sink_mass") -> Figure:
        """The layer-by-head map of a column; see :func:`sinklens.plots.head_map`."""
        from sinklens.plots import head_map

        return head_map(self, column)


def scan(
    model: object,
    prompts: PromptSet,
    *,
    sink_keys: SinkKeys | None = None,
    rule: SinkRule | None = None,
    batch_size: int = 2,
    outputs: bool = True,
    max_bytes: int | None = None,
    progress: bool = True,
) -> SinkScan:
    """Find the sink heads of a model: one row a head, in one pass at the cost of about one forward.

    ``sink_mass`` is the weight on the sink keys, averaged over counted rows and then over sequences; the sink is also
    *located*, as the key that receives most in each sequence.

    Args:
        model: A transformers model, a TransformerBridge, or a model with TransformerLens hooks.
        prompts: What to run; more than ``rule.skip_rows`` tokens each.
        sink_keys: Which keys count as the sink; the first visible token (and a learned sink logit) by default.
        rule: When a head counts as sinking in a sequence; :meth:`SinkRule.gu` gives the published rule exactly.
        batch_size: Sequences a forward pass.
        outputs: Also output norms, value ratio and dormancy; NaN otherwise.
        max_bytes: Refuse to start if the estimated memory exceeds this.
        progress: Show a progress bar.

    Raises:
        InputError, MemoryLimitError, UnsupportedModelError, PatchNotAppliedError: See :func:`record_activity`.

    Example:
        >>> found = sl.scan(model, sl.PromptSet.builtin(tokenizer))     # doctest: +SKIP
        >>> found.sinks(min_mass=0.8)                                   # doctest: +SKIP
        Heads(L18H8, L13H6, ...)
    """
    rule = rule or SinkRule()
    keys = sink_keys or SinkKeys()
    activity = record_activity(model, prompts, sink_keys=keys, skip_rows=rule.skip_rows, batch_size=batch_size,
                               outputs=outputs, max_bytes=max_bytes, progress=progress)  # fmt: skip
    settings = {"sink_keys": keys.describe(), "rule": asdict(rule), "batch_size": batch_size, "outputs": outputs,
                "dormant_mass": DORMANT_MASS, "dormant_ratio": DORMANT_RATIO}  # fmt: skip
    return summarize(activity, rule, settings, provenance(model, prompts.facts()))


def summarize(
    activity: Activity, rule: SinkRule, settings: Mapping[str, Any], made_from: Mapping[str, Any]
) -> SinkScan:
    """Turn a recording into the scan table; a pure function, so that a kept recording can be summarized again."""
    counted = activity.counted(rule.skip_rows)
    tokens = counted.sum(-1)
    used = tokens > 0
    per_sequence = _sequence_mean(activity.mass, counted)[:, used]
    uniform = _sequence_mean(activity.uniform, counted)[:, used].mean(-1)[activity.layer_of_row]
    rms = np.sqrt((activity.norm**2 * counted).sum((-2, -1)) / tokens.sum())
    dormant = is_dormant(activity)
    share = np.where(np.isnan(rms), np.nan, _sequence_mean(dormant, counted)[:, used].mean(-1))
    numbers = {name: values[:, used] for name, values in activity.per_sequence.items()}
    places = [_place(activity, row, np.flatnonzero(used)) for row in numbers["located_position"]]
    mass = per_sequence.mean(-1)
    frame = pd.DataFrame({
        "layer": [head.layer for head in activity.heads],
        "head": [head.head for head in activity.heads],
        "kv_head": [site.kv_head(head) for site in activity.sites for head in range(site.heads)],
        "sink_mass": mass,
        "sink_rate": (per_sequence > rule.eps).mean(-1),
        "uniform_mass": uniform,
        "boost": mass / np.where(uniform > 0, uniform, np.nan),
        "sink_position": [place[0] for place in places],
        "sink_token": [place[1] for place in places],
        "located_mass": numbers["located_mass"].mean(-1),
        "located_share": [place[2] for place in places],
        "first_four_mass": numbers["first_four"].mean(-1),
        "dormant_fraction": share,
        "entropy": numbers["entropy"].mean(-1),
        "value_ratio": numbers["value_ratio"].mean(-1),
        "output_norm": rms,
        "row_sum": numbers["row_sum"].mean(-1),
        "max_row_sum_error": numbers["row_sum_error"].max(-1),
    })  # fmt: skip
    heads, sequences = per_sequence.shape
    long = pd.DataFrame({
        "layer": np.repeat(frame.layer.to_numpy(), sequences),
        "head": np.repeat(frame["head"].to_numpy(), sequences),
        "sequence": np.tile(np.flatnonzero(used), heads),
        "sink_mass": per_sequence.ravel(),
    })  # fmt: skip
    return SinkScan(frame, settings, made_from, {"sequences": long, "passages": _passages(activity, counted)})


def is_dormant(activity: Activity) -> np.ndarray:
    """Which tokens are dormant, bool ``[layer_head, sequence, query]``: mass >= .9 and output <= .25 of a value's."""
    reference = activity.per_sequence["value_norm"][:, :, None]
    return (activity.mass >= DORMANT_MASS) & (activity.norm <= DORMANT_RATIO * reference)


def _passages(activity: Activity, counted: np.ndarray, many: int = 2, tokens: int = 96) -> pd.DataFrame:
    """The start of the first sequences, token by token, with every head's weight on the sink, to look at."""
    prompts = activity.prompts
    places = [(s, p) for s in range(min(many, len(prompts))) for p in np.flatnonzero(prompts.mask[s])[:tokens]]
    sequences, positions = (np.array(part, dtype=int) for part in zip(*places, strict=True))
    frame = pd.DataFrame({
        "passage": [prompts.names[s] for s in sequences],
        "token": [prompts.token(s, p) for s, p in places],
        "counted": counted[sequences, positions],
    })  # fmt: skip
    mass = pd.DataFrame(activity.mass[:, sequences, positions].T.round(3), columns=[str(h) for h in activity.heads])
    return pd.concat([frame, mass], axis=1)


def _sequence_mean(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Mean over the counted tokens of each sequence, ``[row, sequence]``; NaN for a sequence without any."""
    with np.errstate(invalid="ignore"):
        return (values * counted).sum(-1, dtype=np.float64) / counted.sum(-1)


def _place(activity: Activity, positions: np.ndarray, sequences: np.ndarray) -> tuple[int, str, float]:
    """The most common located position of a head, the most common token there, and the position's share."""
    position, hits = Counter(positions.astype(int).tolist()).most_common(1)[0]
    starts = activity.prompts.starts
    at = sequences[positions == position]
    token, _ = Counter(activity.prompts.token(int(s), int(starts[s]) + position) for s in at).most_common(1)[0]
    return position, token, hits / len(positions)
