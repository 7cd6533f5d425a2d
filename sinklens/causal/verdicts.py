"""Verdicts: one row a head, with the five findings and the numbers they rest on; the rule is in ``rule``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from statsmodels.stats.multitest import multipletests

from sinklens.causal.contrasting import Contrast
from sinklens.causal.rule import ALPHA, FORCED, FULLY, MARGIN_NATS, MARGIN_SHARE, PARTLY, Evidence
from sinklens.errors import InputError
from sinklens.table import HeadTable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MEANINGS = {
    "supports fully": "silent where dormant, needed where active, sink value not needed, harmed by a forced read-out, "
    "and a ReLU without a sink does its work",
    "supports partly": "the same, but the fitted ReLU does only part of its work",
    "kernel": "all but the last: no ReLU that was tried does its work; the shape of the kernel matters",
    "always dormant": "it never wakes on this text, so it survives any silent replacement: no evidence either way",
    "redundant": "silencing it where it is active costs nothing: no evidence either way",
    "constant bias": "its sink's contribution is needed, and a constant does as well or nearly so",
    "broadcast": "its sink's contribution is needed, and no constant does as well: it varies, if only in weight",
    "graded": "it works in proportion: mostly at tokens between dormant and active, or at dormant ones too",
    "not forced": "renormalizing does not hurt it more than dropping: normalization does not bind here",
    "never dormant": "no sink head here, or one that keeps reading: it has too few dormant tokens to test",
    "undecided": "the intervals allow more than one reading",
}
"""Every verdict in words."""


class Verdicts(HeadTable):
    """One row a head: the verdict, the five findings, and the numbers they rest on."""

    kind: ClassVar[str] = "verdicts"
    units: ClassVar[Mapping[str, str]] = {
        "layer": "index from 0",
        "head": "query head, from 0",
        "verdict": "see settings",
        "n1": "silence: True, False, or missing where it cannot be tested",
        "n2": "function",
        "n3": "value not needed",
        "n4": "forced read-out hurts",
        "n5": "function without normalization or sink",
        "e4": "KL(fitted ReLU) / KL(silence) on active tokens",
        "log_ratio": "log KL(drop, renormalize) / KL(drop) on dormant tokens",
        "dd": "forced read-out's cost minus the same for the heaviest content key, nats",
        "dd_matched": "the same for random content keys that weigh as much as the sink, changed everywhere, nats",
        "margin": "nats; below it an effect counts as none",
        "between": "share of the head's work done at tokens between dormant and active, 0..1",
        "z_dormant": "KL of silencing on dormant tokens, nats",
        "z_active": "KL of silencing on active tokens, nats",
        "c1_dormant": "KL of dropping the sink on dormant tokens, nats",
        "c1_active": "KL of dropping the sink on active tokens, nats",
        "c1m_dormant": "KL of sink -> its mean on dormant tokens, nats",
        "c1m_active": "KL of sink -> its mean on active tokens, nats",
        "c4_dormant": "KL of the fitted ReLU on dormant tokens, nats",
        "power": "of the fitted ReLU",
        "sink_mass": "mean weight on the sink, 0..1",
        "dormant": "share of tokens, 0..1",
        "active": "share of tokens, 0..1",
        "p": "largest of the five one-sided p-values",
        "p_holm": "the same, adjusted over the heads",
    }

    def reading(self) -> str:
        counts = self.frame.verdict.value_counts()
        named = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return f"{len(self.frame)} heads: {named}."

    def plot(self) -> Figure:
        """Verdicts on the layer-by-head map; see :func:`sinklens.plots.verdict_map`."""
        from sinklens.plots import verdict_map

        return verdict_map(self)


def judge(contrast: Contrast) -> Verdicts:
    """Give every tested head its verdict.

    Args:
        contrast: A contrast run with ``judge=True``.

    Raises:
        InputError: The contrast lacks what a verdict needs.
    """
    if not contrast.settings.get("judge"):
        raise InputError("a verdict needs the interventions done state by state", expected="contrast(..., judge=True)",
                         got="judge=False")  # fmt: skip
    totals, shares, fits = (contrast.frames[name] for name in ("totals", "shares", "fits"))
    resamples, seed = contrast.settings["resamples"], contrast.settings["seed"]
    frame = pd.DataFrame(Evidence(totals, shares, fits, str(head), resamples, seed).row() for head in contrast.heads)
    frame["layer"], frame["head"] = zip(*contrast.heads, strict=True)
    frame["p_holm"] = np.nan
    tested = frame.p.notna()
    if tested.any():
        frame.loc[tested, "p_holm"] = multipletests(frame.p[tested], method="holm")[1]
    lost = frame.verdict.str.startswith("supports") & ~(frame.p_holm < ALPHA)
    frame.loc[lost, "reason"] = "support does not survive the adjustment for the number of heads tested"
    frame.loc[lost, "verdict"] = "undecided"
    order = [name for name in Verdicts.units if name in frame]
    frame = frame[[*order, *(name for name in frame if name not in order)]]
    settings = {
        "meanings": MEANINGS, "margin_share": MARGIN_SHARE, "margin_nats": MARGIN_NATS, "forced": FORCED,
        "fully": FULLY, "partly": PARTLY, "alpha": ALPHA, "caveats": list(contrast.settings["caveats"]),
    }  # fmt: skip
    return Verdicts(frame, settings, contrast.provenance)
