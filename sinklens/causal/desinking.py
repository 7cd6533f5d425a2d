"""Surgery: every head whose verdict allows it runs without a sink, and what the whole model then loses.

A verdict says what may stand in for a head:

- it *supports* normalization: the fitted ReLU, which neither sees the sink nor sums to one;
- *always dormant* or *redundant*: nothing, since silencing it was measured to cost nothing;
- *constant bias*: its own weights without the sink, and the sink's mean contribution in its place;
- any other head whose sink's value is not needed (N3): its own weights without the sink, nothing renormalized. Such a
  head still compares its scores with the sink's, but puts no weight there.

Heads are changed one more at a time, the cheapest first by what each cost alone in the contrast. What they cost
together is measured on text that neither the contrast nor the fits have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from sinklens.causal.calibration import calibrate
from sinklens.causal.contrasting import Contrast, split
from sinklens.causal.interventions import INTERVENTIONS
from sinklens.causal.recipe import Recipe, from_json, to_json
from sinklens.errors import InputError
from sinklens.measures import paired_interval
from sinklens.observe import next_token_losses, record_activity
from sinklens.prompts import PromptSet
from sinklens.scanning import SinkScan
from sinklens.table import HeadTable, provenance
from sinklens.verify import evaluating, verified
from sinklens.vocabulary import Head

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SINKS = 0.3
"""Mean mass above which a head counts as a sink head."""

COUNTS = (0, 10, 20, 40, 60, 80, 100, 120, 140)
"""Points of the curve by default; the number of all that can be changed is added."""


class Desinking(HeadTable):
    """One row a changed head, in the order of change; ``frames["curve"]`` holds the model's loss along that order."""

    kind: ClassVar[str] = "desinking"
    units: ClassVar[Mapping[str, str]] = {
        "layer": "index from 0",
        "head": "query head, from 0",
        "verdict": "of the contrast",
        "form": "what stands in for the head; an intervention's id",
        "cost": "KL of that change alone in the contrast, nats a token",
        "sink_mass": "mean weight on the sink, 0..1",
        "normalizer": "what the head runs on, JSON",
    }

    @property
    def curve(self) -> pd.DataFrame:
        """One row for each number of changed heads and text: loss in nats, and its change with a 95 % interval."""
        return self.frames["curve"]

    def within(self, share: float = 0.01, text: str | None = None) -> int:
        """The largest number of changed heads, of those measured, up to which the loss grows by at most ``share``."""
        rows = self.curve[self.curve.text == (text or self.curve.text.iloc[0])].sort_values("heads")
        over = rows[rows.change > share * rows.loss.iloc[0]]
        kept = rows if over.empty else rows[rows["heads"] < over["heads"].iloc[0]]
        return int(kept["heads"].max())

    def recipe(self, count: int | None = None) -> Recipe:
        """The first ``count`` changes as a recipe; by default all within 1 % of the loss."""
        rows = self.frame.head(self.within() if count is None else count)
        plan = {
            Head(int(layer), int(head)): from_json(json.loads(text))
            for layer, head, text in zip(rows.layer, rows["head"], rows.normalizer, strict=True)
        }
        return Recipe(plan, self.settings["sink_first"], dict(self.provenance))

    def reading(self) -> str:
        count = self.within()
        rows = self.curve[self.curve["heads"] == count].iloc[0]
        start = self.curve[self.curve["heads"] == 0].iloc[0]
        return (
            f"{len(self.frame)} heads can be changed; the first {count} cost {rows.change / start.loss:+.2%} of the "
            f"loss and leave {rows.sink_heads} of {start.sink_heads} sink heads."
        )

    def plot(self) -> Figure:
        """Loss and remaining sink heads over the number of changed heads; see :func:`sinklens.plots.desink_curve`."""
        from sinklens.plots import desink_curve

        return desink_curve(self)


def desink(
    model: object,
    scan: SinkScan,
    contrast: Contrast,
    prompts: PromptSet,
    *,
    second: PromptSet | None = None,
    calibration: PromptSet | None = None,
    min_mass: float = SINKS,
    counts: Sequence[int] = COUNTS,
    batch_size: int = 2,
    resamples: int = 2000,
    seed: int = 0,
    progress: bool = True,
) -> Desinking:
    """Replace every sink head whose verdict allows it by a head without a sink, and measure the model along the way.

    Args:
        model: The causal language model that scan and contrast were made on.
        scan: Says which heads are sink heads.
        contrast: A contrast with ``judge=True`` of the heads in question.
        prompts: Held-out text that the loss is measured on; not that of the contrast.
        second: Text of a second kind.
        calibration: Sequences for means and fits; every fourth of ``prompts`` by default.
        min_mass: Heads with less mean mass on the sink, by the scan, are left as they are.
        counts: At how many changed heads to measure.
        batch_size: Sequences a pass.
        resamples: Bootstrap size.
        seed: Seed of the resampling.
        progress: Show a progress bar.

    Raises:
        InputError: The contrast gives no verdicts or belongs to another model or other text, or no head may be changed.
    """
    backend = verified(model)
    calibration, held_out = split(prompts, calibration)
    if seen := held_out.shared(contrast.settings["seen"]):
        raise InputError("heads were chosen on this text", expected="no sequence that the contrast has seen",
                         got=f"{len(seen)} of it, {seen[0]} first")  # fmt: skip
    first = contrast.settings["sink_first"]
    if first is None:
        raise InputError("a recipe needs a sink that every text has", expected="the first tokens as the sink",
                         got=contrast.settings["sink_keys"])  # fmt: skip
    chosen = _chosen(contrast, scan, min_mass)
    known = {Head(site.layer, head) for site in backend.sites for head in range(site.heads)}
    if foreign := [str(head) for head in chosen if head not in known]:
        raise InputError("the contrast is of another model", expected="heads of this model", got=", ".join(foreign[:4]))
    if not chosen:
        raise InputError(
            "no verdict allows a change", expected=f"a head above {min_mass:g} of sink mass whose sink is not needed",
            got=", ".join(contrast.verdicts().frame.verdict.value_counts().index),
        )  # fmt: skip
    fitted = any(row["form"].startswith("C4") for row in chosen.values())
    calibrated = calibrate(model, calibration, list(chosen), fit=fitted, skip_rows=contrast.settings["skip_rows"],
                           batch_size=batch_size)  # fmt: skip
    plan = {head: INTERVENTIONS[row["form"]].normalizer(calibrated[head]) for head, row in chosen.items()}
    frame = pd.DataFrame(
        {"layer": head.layer, "head": head.head, **row, "normalizer": json.dumps(to_json(plan[head]))}
        for head, row in chosen.items()
    )
    texts = {"held-out": held_out} | ({"second": second} if second is not None else {})
    steps = sorted({0, len(plan), *(count for count in counts if 0 <= count <= len(plan))})
    rows: list[dict[str, Any]] = []
    clean: dict[str, np.ndarray] = {}
    bar = tqdm(total=len(steps) * len(texts), desc="desinking", unit="pass", disable=not progress)
    for count in steps:
        recipe = Recipe(dict(list(plan.items())[:count]), first)
        with recipe.applied(model):
            for name, text in texts.items():
                loss = next_token_losses(model, text, batch_size=batch_size)
                clean.setdefault(name, loss)
                state = _state(model, text, contrast.settings["skip_rows"], batch_size)
                rows.append(
                    {"heads": count, "text": name, **_summary(clean[name], loss, text, resamples, seed), **state}
                )
                bar.update()
    bar.close()
    settings = {
        "min_mass": min_mass, "sink_first": first, "skip_rows": contrast.settings["skip_rows"], "seed": seed,
        "resamples": resamples, "forms": {name: INTERVENTIONS[name].words for name in sorted(set(frame.form))},
        "texts": {name: text.facts() for name, text in texts.items()}, "calibration": calibration.facts(),
    }  # fmt: skip
    return Desinking(frame, settings, provenance(backend.model, held_out.facts()), {"curve": pd.DataFrame(rows)})


def _chosen(contrast: Contrast, scan: SinkScan, min_mass: float) -> dict[Head, dict[str, Any]]:
    """Heads that may be changed, the cheapest first, with what stands in for each."""
    verdicts = contrast.verdicts()
    mass = dict(zip(scan.heads, scan.frame.sink_mass, strict=True))
    totals = contrast.frames["totals"]
    at_states = totals[(totals["at"] != "everywhere") & (totals.tokens == "all")]
    reach = at_states.groupby(["heads", "intervention"]).kl.sum()
    tokens = (
        totals[totals.tokens == "all"].groupby(["heads", "intervention", "at"])["count"].sum().groupby("heads").max()
    )
    found = {}
    for head, (_, row) in zip(verdicts.heads, verdicts.frame.iterrows(), strict=True):
        form = allowed_form(row)
        if form is None or mass.get(head, 0.0) < min_mass:
            continue
        cost = float(reach[str(head), form] / tokens[str(head)])
        found[head] = {"verdict": row.verdict, "form": form, "cost": cost,
                       "sink_mass": float(mass[head])}  # fmt: skip
    return dict(sorted(found.items(), key=lambda item: item[1]["cost"]))


def allowed_form(row: Any) -> str | None:
    """What may stand in for a head, as an intervention's id, from its row of verdicts; None to leave it as it is."""
    if row.verdict.startswith("supports"):
        return "C4f" if row.power == 1 else "C4f2"
    if row.verdict in ("always dormant", "redundant"):
        return "Z"
    if row.verdict == "constant bias":
        return "C1m"
    return "C1" if row.n3 == 1 else None


def _summary(clean: np.ndarray, loss: np.ndarray, text: PromptSet, resamples: int, seed: int) -> dict[str, float]:
    predicted = (text.mask[:, 1:] & text.mask[:, :-1]).sum(-1).double().numpy()
    change = paired_interval(
        lambda total, count, axis=-1: total.sum(axis) / count.sum(axis), (loss - clean).sum(-1), predicted,
        resamples=resamples, rng=np.random.default_rng(seed),
    )  # fmt: skip
    interval = asdict(change)
    return {"loss": float(loss.sum() / predicted.sum()), "change": interval["estimate"], "low": interval["low"],
            "high": interval["high"]}  # fmt: skip


def _state(model: object, text: PromptSet, skip_rows: int, batch_size: int) -> dict[str, float]:
    """How much of the sink is left: heads above :data:`SINKS`, mean mass, and the residual stream's outliers."""
    activity = record_activity(model, text, skip_rows=skip_rows, batch_size=batch_size, outputs=False, locate=False,
                               progress=False)  # fmt: skip
    counted = activity.counted(skip_rows)
    mass = (activity.mass * counted).sum((1, 2)) / counted.sum()
    return {"sink_heads": int((mass > SINKS).sum()), "sink_mass": float(mass.mean()),
            "massive": massive_activation(model, text)}  # fmt: skip


def massive_activation(model: object, text: PromptSet) -> float:
    """Largest absolute entry of the residual stream over the median one of its layer, at most over layers, on one text.

    Massive activations (arXiv 2402.17762) have ratios of a thousand and more. NaN where the model does not return
    hidden states.
    """
    network = verified(model).model
    if not hasattr(network, "base_model"):
        return float("nan")
    tokens = text.tokens[:1, text.mask[0]].to(next(network.parameters()).device)
    with evaluating(network), torch.inference_mode():
        states = network(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    sizes = [state.float().abs() for state in states[1:-1]]
    return max((float(size.max() / size.median().clamp(min=1e-12)) for size in sizes), default=float("nan"))
