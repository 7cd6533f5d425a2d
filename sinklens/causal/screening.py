"""A first estimate for every head and every intervention at once, from one forward and one backward pass a batch.

An intervention changes the output of a head at a token by ``delta``, which depends on that head's own scores and values
alone. To second order the predictions change by ``KL = 1/2 delta' F delta``, with ``F`` the Fisher information of all
next-token distributions about that output. If labels are drawn from the model itself and ``g`` is the gradient of their
log-likelihood at the output, then ``F = E[g g']``: so ``1/2 (g . delta)^2`` estimates the KL divergence in nats, summed
over all tokens that the change can reach, without bias. No variant of the model is run.

It says which heads and interventions are worth an exact run (:func:`sinklens.causal.contrast`). It is no verdict:
large changes leave the range of the second order, and changes of several tokens are taken one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from tqdm.auto import tqdm

from sinklens.attention import AttentionCall, AttentionResult, Inner, attend
from sinklens.causal.calibration import ACTIVE, DORMANT, HeadCalibration, calibrate
from sinklens.causal.contrasting import Contrast, split
from sinklens.causal.interventions import FULL, Intervention
from sinklens.causal.interventions import interventions as look_up
from sinklens.errors import InputError, PatchNotAppliedError, UnsupportedModelError
from sinklens.normalizers import Normalizer
from sinklens.normalizers.stacked import stacked
from sinklens.observe import every_head, mass_on
from sinklens.patch import Patch
from sinklens.prompts import PromptSet
from sinklens.table import HeadTable, provenance
from sinklens.verify import evaluating, verified
from sinklens.vocabulary import Head, Heads, HeadsLike, SinkKeys

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STATES = ("all", "dormant", "active")


class Screening(HeadTable):
    """An estimate for every head, intervention and state of the tokens."""

    kind: ClassVar[str] = "screening"
    units: ClassVar[Mapping[str, str]] = {
        "layer": "index from 0",
        "head": "query head, from 0",
        "intervention": "see settings",
        "tokens": "dormant (s >= .9), active (s <= .5), all",
        "count": "tokens",
        "kl": "estimated KL of changing the head at one token, over all it reaches; nats, mean over tokens",
        "sink_mass": "mean weight on the sink, 0..1",
    }

    @property
    def heads(self) -> Heads:
        """The heads that were screened."""
        rows = self.frame.drop_duplicates(["layer", "head"])
        return Heads(Head(int(layer), int(head)) for layer, head in zip(rows.layer, rows["head"], strict=True))

    def of(self, intervention: Intervention | str, tokens: Literal["all", "dormant", "active"] = "all") -> pd.DataFrame:
        """One row a head for one intervention and state, the largest effect first."""
        (wanted,) = look_up([intervention])
        rows = self.frame[(self.frame.intervention == wanted.id) & (self.frame.tokens == tokens)]
        return rows.sort_values("kl", ascending=False, kind="stable")

    def top(self, count: int, intervention: str = "Z", tokens: Literal["all", "dormant", "active"] = "active") -> Heads:
        """The heads for which an intervention matters most."""
        rows = self.of(intervention, tokens).dropna(subset="kl").head(count)
        return Heads(Head(int(layer), int(head)) for layer, head in zip(rows.layer, rows["head"], strict=True))

    def agreement(self, contrast: Contrast) -> pd.DataFrame:
        """Spearman's rank correlation over heads with the exact KL of a contrast, by intervention and state.

        Changes made at the tokens of one state are compared by what they do to all tokens; changes made everywhere
        likewise.
        """
        sums = contrast.frames["totals"]
        reach = sums[sums.tokens == "all"].groupby(["heads", "intervention", "at"]).kl.sum()
        tokens = sums[(sums.tokens == sums["at"]) | ((sums["at"] == "everywhere") & (sums.tokens == "all"))]
        counts = tokens.groupby(["heads", "intervention", "at"])["count"].sum()
        exact = (reach / counts).rename("exact").reset_index()
        exact["tokens"] = exact["at"].replace({"everywhere": "all"})
        names = [str(Head(*pair)) for pair in zip(self.frame.layer, self.frame["head"], strict=True)]
        mine = self.frame.assign(heads=names)
        both = mine.merge(exact, on=["heads", "intervention", "tokens"]).dropna(subset=["kl", "exact"])
        rows = [
            {"intervention": name, "tokens": state, "heads": len(group),
             "spearman": float(stats.spearmanr(group.kl, group.exact).statistic),
             "median_ratio": float((group.kl / group.exact.clip(lower=1e-12)).median())}
            for (name, state), group in both.groupby(["intervention", "tokens"], sort=False) if len(group) > 2
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=["intervention", "tokens", "heads", "spearman", "median_ratio"])

    def reading(self) -> str:
        silenced = self.of("Z", "all") if "Z" in set(self.frame.intervention) else self.frame[:0]
        if silenced.empty:
            return f"{self.frame[['layer', 'head']].drop_duplicates().shape[0]} heads screened."
        best = silenced.iloc[0]
        return (
            f"{len(silenced)} heads screened; silencing costs most at L{best.layer}H{best['head']}, "
            f"about {best.kl:.4f} nats a token, and half of the heads less than {silenced.kl.median():.4f}."
        )

    def preview(self) -> pd.DataFrame:
        """KL of every intervention over all tokens, one row a head."""
        rows = self.frame[self.frame.tokens == "all"]
        wide = rows.pivot(index=["layer", "head", "sink_mass"], columns="intervention", values="kl")
        return wide[list(dict.fromkeys(rows.intervention))].add_prefix("KL ").reset_index()

    def plot(self, intervention: str = "Z", tokens: Literal["all", "dormant", "active"] = "all") -> Figure:
        """One intervention's estimated effect on the layer-by-head map, log10 nats."""
        from sinklens.plots import head_map

        rows = self.of(intervention, tokens).sort_values(["layer", "head"])
        drawn = rows.assign(log10_kl=np.log10(rows.kl.clip(lower=1e-9)))
        (wanted,) = look_up(intervention)
        table = HeadTable(drawn, self.settings, self.provenance)
        return head_map(table, "log10_kl", title=f"Estimated KL: {wanted.words}; {tokens} tokens")


def screen(
    model: object,
    prompts: PromptSet,
    heads: HeadsLike | None = None,
    *,
    interventions: Sequence[Intervention | str] = FULL,
    calibration: PromptSet | None = None,
    sink_keys: SinkKeys | None = None,
    skip_rows: int = 8,
    batch_size: int = 2,
    draws: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> Screening:
    """Estimate what every intervention would do at every head: ``1/2 (g . delta)^2`` by head, token and intervention.

    Args:
        model: A causal language model: transformers, or TransformerLens.
        prompts: Test sequences.
        heads: Which heads; all by default.
        interventions: Which interventions, as objects or ids.
        calibration: Sequences for means and fits; every fourth test sequence is set aside for them by default.
        sink_keys: Which keys count as the sink.
        skip_rows: Rows at each sequence's start that are left out.
        batch_size: Sequences a pass.
        draws: Labels drawn for each token; each costs one backward pass.
        seed: Seed of the labels.
        progress: Show a progress bar.

    Raises:
        InputError: An unknown intervention, too few sequences, or calibration and test overlap.
        UnsupportedModelError: The model gives no next-token distribution, or no gradient reaches a layer.
    """
    backend = verified(model)
    if any(site.kind != "causal" for site in backend.sites):
        raise UnsupportedModelError(
            "screening needs next-token distributions", expected="a causal language model", got=type(model).__name__
        )
    if draws < 1:
        raise InputError("screening draws labels", expected="draws >= 1", got=draws)
    chosen = look_up(interventions)
    asked = every_head(backend.sites) if heads is None else Heads.of(heads).check(backend.sites)
    calibration, test = split(prompts, calibration)
    keys = sink_keys or SinkKeys()
    calibrated = calibrate(model, calibration, asked, fit=any(i.fitted for i in chosen), sink_keys=keys,
                           skip_rows=skip_rows, batch_size=batch_size)  # fmt: skip
    weigher = _Weigher(asked, chosen, calibrated, keys, draws)
    generator = torch.Generator().manual_seed(seed)
    bar = tqdm(total=len(test), desc="screening", unit="seq", disable=not progress)
    with bar, evaluating(backend.model):
        for rows, tokens, mask in test.batches(batch_size):
            real = test.mask[rows]
            weigher.counted = real & (real.cumsum(-1) > skip_rows)
            with torch.enable_grad(), backend.attach(weigher):
                logits = backend.forward(tokens, mask).float().log_softmax(-1)
            for draw in range(draws):
                # Labels come from the model itself: that makes the squared gradient the Fisher information.
                labels = _drawn(logits.detach(), generator)
                likelihood = (logits.gather(-1, labels[..., None]).squeeze(-1) * real.to(logits.device)).sum()
                weigher.backward(likelihood, keep=draw + 1 < draws)
            bar.update(len(tokens))
    settings = {
        "interventions": {i.id: f"{i.words}: {i.isolates}" for i in chosen}, "draws": draws, "seed": seed,
        "sink_keys": keys.describe(), "skip_rows": skip_rows, "dormant": DORMANT, "active": ACTIVE,
        "calibration": calibration.facts(),
    }  # fmt: skip
    return Screening(weigher.frame(), settings, provenance(backend.model, test.facts()))


def _drawn(logs: Tensor, generator: torch.Generator) -> Tensor:
    flat = logs.exp().flatten(0, 1).cpu()
    return torch.multinomial(flat, 1, generator=generator).view(logs.shape[:2]).to(logs.device)


@dataclass
class _Weigher:
    """A route that puts a zero beside every head output, to read the gradient there, and weighs changes with it."""

    heads: Heads
    interventions: Sequence[Intervention]
    calibrated: Mapping[Head, HeadCalibration]
    keys: SinkKeys
    draws: int
    counted: Tensor = field(default_factory=lambda: torch.zeros(0))
    zeros: dict[int, Tensor] = field(default_factory=dict)
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    mass: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_layer = self.heads.by_layer()
        self.patches = {i.id: Patch.of(self._plan(i), self.keys) for i in self.interventions}

    def _plan(self, intervention: Intervention) -> dict[Head, Normalizer]:
        """The heads of a layer that differ in numbers only share a normalizer, so that they run together."""
        plan: dict[Head, Normalizer] = {}
        for layer, heads in self.by_layer.items():
            groups: list[dict[Head, Normalizer]] = []
            for head in (Head(layer, index) for index in heads):
                mine = intervention.normalizer(self.calibrated[head])
                group = next((g for g in groups if stacked([*g.values(), mine]) is not None), None)
                if group is None:
                    groups.append(group := {})
                group[head] = mine
            for group in groups:
                together = stacked(list(group.values()))
                plan |= {head: together if together is not None else mine for head, mine in group.items()}
        return plan

    def __call__(self, call: AttentionCall, inner: Inner) -> AttentionResult:
        result = inner(call)
        layer = call.site.layer
        if layer not in self.by_layer:
            return result
        zero = torch.zeros_like(result.output, requires_grad=True)
        self.zeros[layer] = zero
        self.calls[layer] = replace(call, query=call.query.detach(), key=call.key.detach(), value=call.value.detach())
        return AttentionResult(result.call, result.output + zero, replaced=True)

    def backward(self, likelihood: Tensor, *, keep: bool) -> None:
        layers = sorted(self.zeros)
        if not layers:
            raise PatchNotAppliedError("the model ran but no attention layer reported", expected="every layer", got=0)
        found = torch.autograd.grad(
            likelihood, [self.zeros[layer] for layer in layers], retain_graph=keep, allow_unused=True
        )
        for layer, gradient in zip(layers, found, strict=True):
            if gradient is None:
                raise UnsupportedModelError(
                    "screening needs the gradient at every head", expected=f"a gradient at layer {layer}", got="none"
                )
            self._weigh(layer, self.calls[layer], gradient.float())

    @torch.no_grad()
    def _weigh(self, layer: int, call: AttentionCall, gradient: Tensor) -> None:
        index = list(self.by_layer[layer])
        plain = attend(call)
        mass = mass_on(plain, self.keys).sum(-1)[:, index]
        counted = self.counted.to(mass.device)[:, None].expand_as(mass)
        states = torch.stack([counted, counted & (mass >= DORMANT), counted & (mass <= ACTIVE)]).float()
        weighed = []
        for intervention in self.interventions:
            output = self.patches[intervention.id](call, attend).output[:, index]
            if intervention.alter is not None:
                output = intervention.alter(plain.output[:, index], output, mass)
            change = (output - plain.output[:, index]).float()
            kl = 0.5 * (gradient[:, index] * change).sum(-1) ** 2 / self.draws
            weighed.append((states * kl).sum((1, 3)))
        self.sums[layer] = self.sums.get(layer, 0) + torch.stack(weighed).cpu().double()
        self.counts[layer] = self.counts.get(layer, 0) + states.sum((1, 3)).cpu().double() / self.draws
        self.mass[layer] = self.mass.get(layer, 0) + (mass * counted).sum((0, 2)).cpu().double() / self.draws

    def frame(self) -> pd.DataFrame:
        """One row a head, intervention and state."""
        rows: list[dict[str, Any]] = []
        for layer, heads in self.by_layer.items():
            for place, head in enumerate(heads):
                mass = float(self.mass[layer][place] / self.counts[layer][0, place])
                for number, intervention in enumerate(self.interventions):
                    for which, state in enumerate(STATES):
                        count = float(self.counts[layer][which, place])
                        kl = float(self.sums[layer][number, which, place]) / count if count else np.nan
                        rows.append({"layer": layer, "head": head, "intervention": intervention.id, "tokens": state,
                                     "count": round(count), "kl": kl, "sink_mass": mass})  # fmt: skip
        return pd.DataFrame(rows)
