"""The contrast: what normalization does at a head, measured against controls, with intervals over sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinklens.causal.calibration import ACTIVE, DORMANT, HeadCalibration, calibrate
from sinklens.causal.interventions import CORE, Intervention
from sinklens.causal.interventions import interventions as look_up
from sinklens.causal.journal import Journal
from sinklens.causal.rule import FEWEST, FIRST, Evidence
from sinklens.causal.sweep import Effects, Variant, sweep
from sinklens.errors import InputError, PatchNotAppliedError, UnsupportedModelError
from sinklens.measures import gram, ratio_interval
from sinklens.observe import Activity, record_activity
from sinklens.patch import Patch
from sinklens.prompts import PromptSet
from sinklens.table import HeadTable, provenance
from sinklens.verify import verified
from sinklens.vocabulary import Head, Heads, HeadsLike, SinkKeys, Site

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from sinklens.causal.verdicts import Verdicts

State = Literal["dormant", "active", "all", "trigger"]

_OF_CONTROLS = look_up("C0,C1,C2,R2,Z")
METRICS = {
    "kl": "KL(clean || changed) of the next token, nats a token",
    "dloss": "change of next-token loss, nats a token",
    "output_error": "squared change of the heads' output after W_O / its variance",
}
"""What is measured."""

NO_SINK = 0.3
"""Below this mean weight on the sink a head is said to be no sink head."""

_CLEAN_KL = 1e-5

CAVEATS = (
    "Renormalizing multiplies the content by 1/(1-s): C2 hurting more than C1 is near-tautological by itself.",
    "A swap after training asks whether a head without normalization could do the work, not what caused the sink.",
    "The gauge and threshold of a ReLU decide its effect; C4 and C4raw are not fitted.",
    "Heads can cancel each other: a head that does nothing alone may matter in its layer.",
)


class Marking(Protocol):
    """Says at which tokens of a text heads wake."""

    def marks(self, prompts: PromptSet) -> dict[Head, np.ndarray]: ...


@dataclass(frozen=True)
class Unit:
    """What is changed at once: one head, or a set of heads.

    Attributes:
        heads: The heads.
        role: ``sink`` for what was asked about, ``control`` for a matched non-sink head of the same layer.
    """

    heads: Heads
    role: Literal["sink", "control", "set"]

    @property
    def name(self) -> str:
        if len(self.heads) <= 4:
            return ",".join(map(str, self.heads))
        return f"{self.heads[0]}+{len(self.heads) - 1}"


class Contrast(HeadTable):
    """What a contrast found, in long form: one row for each unit, intervention, place, state of the tokens, and metric.

    ``at`` tells where an intervention was done: ``everywhere``, or only at the tokens of one state (see
    :func:`contrast`). ``frames["totals"]`` holds the sums over tokens of every sequence, from which intervals can be
    made again; ``frames["fits"]`` what was fitted.
    """

    kind: ClassVar[str] = "contrast"
    units: ClassVar[Mapping[str, str]] = {
        "heads": "what is changed at once: a head, or a set",
        "role": "sink, control (non-sink head of the layer) or set",
        "layer": "index from 0; -1 for a set",
        "head": "query head, from 0; -1 for a set",
        "sink_mass": "mean weight on the sink, 0..1",
        "intervention": "see settings",
        "at": "the tokens at which it was done",
        "tokens": "dormant (s >= .9), active (s <= .5), trigger, all",
        "share": "share of tokens in this state, 0..1",
        "count": "tokens",
        "sequences": "count",
        "metric": "; ".join(f"{name}: {words}" for name, words in METRICS.items()),
        "estimate": "see metric",
        "low": "lower end of the 95 % interval",
        "high": "upper end of the 95 % interval",
    }

    @property
    def heads(self) -> Heads:
        """The single heads that were tested, controls left out."""
        asked = self.frame[self.frame.role == "sink"].drop_duplicates("heads")
        return Heads(Head(int(layer), int(head)) for layer, head in zip(asked.layer, asked["head"], strict=True))

    def effects(self, heads: str, tokens: State = "all", at: str | None = None) -> pd.DataFrame:
        """One row an intervention, with columns ``kl, kl_low, kl_high`` and the same for every other metric.

        Args:
            heads: Name of a unit, as in the column ``heads``.
            tokens: Which tokens the effects are measured at.
            at: Where the interventions were done; ``everywhere`` unless the unit was only changed state by state.

        Raises:
            InputError: The heads were not tested; lists those that were.
        """
        known = list(dict.fromkeys(self.frame["heads"]))
        if heads not in known:
            raise InputError("these heads were not tested", expected=f"one of {', '.join(known)}", got=heads)
        wide = self._shown if at is None else self._wide[self._wide["at"] == at]
        return wide[(wide["heads"] == heads) & (wide.tokens == tokens)].set_index("intervention")

    @property
    def shown(self) -> pd.DataFrame:
        """Rows of changes made everywhere; of units that were only changed state by state, those."""
        return self.frame[self._is_shown(self.frame)]

    @property
    def _shown(self) -> pd.DataFrame:
        return self._wide[self._is_shown(self._wide)]

    def _is_shown(self, frame: pd.DataFrame) -> pd.Series:
        everywhere = frame["at"] == "everywhere"
        whole = set(frame.loc[everywhere & (frame.intervention != "C0"), "heads"])
        return everywhere | (~frame["heads"].isin(whole) & (frame["at"] == frame.tokens))

    @cached_property
    def _wide(self) -> pd.DataFrame:
        # The rows of one unit, intervention and state stand together, one a metric and in the same order.
        parts = {metric: part.reset_index(drop=True) for metric, part in self.frame.groupby("metric", sort=False)}
        wide = next(iter(parts.values())).drop(columns=["metric", "estimate", "low", "high"])
        for metric, part in parts.items():
            wide[[metric, f"{metric}_low", f"{metric}_high"]] = part[["estimate", "low", "high"]]
        return wide

    def reading(self) -> str:
        everywhere = self._wide[(self._wide.tokens == "all") & (self._wide["at"] == "everywhere")]
        every = everywhere.set_index(["heads", "intervention"])
        whole = [head for head in self.heads if all((str(head), name) in every.index for name in ("C1", "C2", "Z"))]
        lines = [] if whole else [f"{len(self.heads)} heads, changed state by state: see their verdicts."]
        for head in whole:
            drop, forced, silent = (every.loc[(str(head), i)] for i in ("C1", "C2", "Z"))
            lines.append(
                f"{head}: dropping its sink costs {drop.kl:.4f} nats of KL, dropping and renormalizing "
                f"{forced.kl:.4f} [{forced.kl_low:.4f}, {forced.kl_high:.4f}], silencing it {silent.kl:.4f}."
            )
        return " ".join(lines)

    def verdicts(self) -> Verdicts:
        """What each head says about normalization; see :mod:`sinklens.causal.verdicts`.

        Raises:
            InputError: The contrast was run without ``judge=True``.
        """
        from sinklens.causal.verdicts import judge

        return judge(self)

    def preview(self) -> pd.DataFrame:
        """KL of every intervention, one row for each unit and state of its tokens."""
        states = self._shown[self._shown.tokens.isin(["dormant", "active"]) & (self._shown["count"] > 0)]
        keys = ["heads", "role", "tokens", "count"]
        wide = states.pivot(index=keys, columns="intervention", values="kl")
        order = list(dict.fromkeys(states.intervention))
        return wide[order].reindex(states[keys].drop_duplicates()).add_prefix("KL ").reset_index()

    def plot(self, metric: str = "kl") -> Figure:
        """Effects by intervention and token state, with intervals; see :func:`sinklens.plots.contrast_bars`."""
        from sinklens.plots import contrast_bars

        return contrast_bars(self, metric)

    def plot_doses(self, metric: str = "kl") -> Figure:
        """Effect over the dose of those interventions that were given in doses; :func:`sinklens.plots.dose_curves`."""
        from sinklens.plots import dose_curves

        return dose_curves(self, metric)


def contrast(
    model: object,
    prompts: PromptSet,
    heads: HeadsLike,
    *,
    sets: Sequence[HeadsLike | int] = (),
    interventions: Sequence[Intervention | str] = CORE,
    judge: bool = False,
    calibration: PromptSet | None = None,
    controls: bool = True,
    triggers: Mapping[Head, Collection[int]] | Marking | None = None,
    sink_keys: SinkKeys | None = None,
    skip_rows: int = 8,
    batch_size: int = 2,
    resamples: int = 2000,
    seed: int = 0,
    reuse: bool = True,
    journal: str | Path | None = None,
    progress: bool = True,
) -> Contrast:
    """Change chosen heads in several ways and measure what the model's predictions lose, with paired intervals.

    Effects are reported apart for tokens at which the head is dormant (s >= .9) and active (s <= .5). Never read one
    intervention alone: ``Z`` says whether the head matters on this text at all, the control heads whether an effect is
    special to sinks, ``C1`` whether the sink's value is needed. Intervals are paired BCa bootstraps over sequences.

    Args:
        model: A causal language model: transformers, or TransformerLens.
        prompts: Test sequences, at least 3 for intervals.
        heads: The heads to test, each by itself.
        sets: Sets of heads changed together; a number stands for a whole layer.
        interventions: What to do, as objects or ids; ``C0`` is always added and must have no effect.
        judge: Also do what a verdict needs: each deciding intervention at the head's dormant tokens only, and at its
            active tokens only. An intervention done everywhere reaches a dormant token also through earlier tokens at
            which the head was awake, and would be blamed on the dormant one. A first look (silence, drop the sink)
            settles most heads; only those it leaves open get a second one (renormalize, fitted ReLU, controls).
        calibration: Sequences for means and fits; every fourth test sequence is set aside for them by default.
        controls: Also test the head with the least sink mass in each tested layer.
        triggers: Token ids that wake a head, or a :class:`sinklens.TriggerReport`; the tokens at which the head is said
            to wake are reported apart, as state ``trigger``.
        sink_keys: Which keys count as the sink.
        skip_rows: Rows at each sequence's start that are left out.
        batch_size: Sequences of a clean pass.
        resamples: Bootstrap size.
        seed: Seed of the resampling.
        reuse: Reuse the clean run below the changed layer and share batches.
        journal: A file that keeps every finished part, so that a run that was killed goes on where it stopped and gives
            the same table.
        progress: Show a progress bar.

    Raises:
        InputError: Calibration and test overlap, too few sequences, an unknown intervention, or another run's journal.
        UnsupportedModelError: The model gives no next-token distribution.
        PatchNotAppliedError: The unchanged variant C0 differs from the clean run.
    """
    backend = verified(model)
    if any(site.kind != "causal" for site in backend.sites):
        raise UnsupportedModelError(
            "a contrast measures next-token loss", expected="a causal language model", got=type(model).__name__
        )
    asked = Heads.of(heads).check(backend.sites)
    groups = [Heads.of(_whole(group, backend.sites)).check(backend.sites) for group in sets]
    if not asked and not groups:
        raise InputError("a contrast needs heads", expected="at least one head", got="none")
    chosen = tuple({i.id: i for i in look_up(["C0", *interventions])}.values())
    calibration, test = split(prompts, calibration)
    keys = sink_keys or SinkKeys()
    activity = record_activity(model, test, sink_keys=keys, skip_rows=skip_rows, batch_size=batch_size, outputs=False,
                               locate=False, progress=progress)  # fmt: skip
    units = [Unit(Heads([head]), "sink") for head in asked] + [Unit(group, "set") for group in groups]
    units += _controls(activity, asked, skip_rows) if controls else []
    _check_names(units)
    marked = _marked(triggers or {}, test)
    totals = _Totals(activity, units, skip_rows, marked)
    every = Heads.of([head for unit in units for head in unit.heads])
    fit = judge or any(intervention.fitted for intervention in chosen)
    calibrated = calibrate(model, calibration, every, fit=fit, sink_keys=keys, skip_rows=skip_rows,
                           batch_size=batch_size)  # fmt: skip
    plans = _Plans(calibrated, keys, totals)
    variants = plans.everywhere(units, chosen)
    if judge:
        variants += [variant for unit in units if unit.role != "control" for variant in plans.by_state(unit, FIRST)]
    layers = {head.layer for unit in units for head in unit.heads}
    grams = {site.layer: gram(backend.output_matrix(site)) for site in backend.sites if site.layer in layers}
    looked = look_up("Z,C1,Mn,C1m,C2,R1,R2,C4f,C4f2") if judge else ()
    settings = {
        "metrics": METRICS, "interventions": {i.id: f"{i.words}: {i.isolates}" for i in [*chosen, *looked]},
        "judge": judge,
        "sink_keys": keys.describe(), "sink_first": None if keys.positions is not None else keys.first,
        "skip_rows": skip_rows, "dormant": DORMANT, "active": ACTIVE,
        "resamples": resamples, "seed": seed, "calibration": calibration.facts(), "caveats": list(CAVEATS),
        "seen": calibration.hashes + test.hashes,
        "sets": {unit.name: str(unit.heads) for unit in units if unit.role == "set"},
        "triggers": {str(head): {"tokens": int(track.sum()), "fingerprint": _fingerprint(np.packbits(track).tobytes())}
                     for head, track in marked.items()},
        "remarks": _remarks(units, totals, backend.sites),
    }  # fmt: skip
    made_from = provenance(backend.model, test.facts())
    with Journal.opened(journal, _identity(backend.model, variants, settings, test, batch_size, reuse)) as written:

        def run(variants: Sequence[Variant]) -> pd.DataFrame:
            parts = sweep(backend, test, variants, grams, batch_size=batch_size, reuse=reuse, progress=progress,
                          done=lambda rows, chunk: written.has(_part(rows, chunk)))  # fmt: skip
            for rows, outcomes in parts:
                sums = [row for variant, effects in outcomes for row in totals.rows(rows, variant.name, effects)]
                written.add(_part(rows, [variant for variant, _ in outcomes]), sums)
            return totals.frame(written.rows())

        long, shares, fits = run(variants), totals.share(), _fits(calibrated)
        if judge:
            looks = [(unit, Evidence(long, shares, fits, unit.name, resamples, seed).second_look())
                     for unit in units if unit.role == "sink"]  # fmt: skip
            second = [variant for unit, needed in looks for variant in plans.by_state(unit, needed)]
            long = run(second) if second else long
    _check_unchanged(long)
    frames = {"totals": long, "shares": shares} | ({"fits": fits} if fit else {})
    return Contrast(_table(long, shares, resamples, seed), settings, made_from, frames)


def _marked(triggers: Mapping[Head, Collection[int]] | Marking, prompts: PromptSet) -> Mapping[Head, np.ndarray]:
    if not isinstance(triggers, Mapping):
        return triggers.marks(prompts)
    return {head: np.isin(prompts.tokens.numpy(), list(ids)) for head, ids in triggers.items()}


def _whole(group: HeadsLike | int, sites: Sequence[Site]) -> HeadsLike:
    if not isinstance(group, int):
        return group
    found = [Head(site.layer, head) for site in sites if site.layer == group for head in range(site.heads)]
    if not found:
        raise InputError("no such layer", expected=f"0 to {len(sites) - 1}", got=group)
    return found


def _remarks(units: Sequence[Unit], totals: _Totals, sites: Sequence[Site]) -> list[str]:
    """What a reader should know of the heads before reading effects."""
    asked = [unit for unit in units if unit.role == "sink"]
    counted = totals.counted
    quiet = [unit.name for unit in asked if totals.mass[unit.name][counted].mean() < NO_SINK]
    awake = [unit.name for unit in asked if not totals.states(unit.name, slice(None))["dormant"].any()]
    groups = {site.layer: site.heads // site.kv_heads for site in sites}
    mixed = [
        unit.name for unit in units if unit.role == "set"
        and any(len({head // groups[layer] for head in heads}) > 1 for layer, heads in unit.heads.by_layer().items())
        and any(size > 1 for size in groups.values())
    ]  # fmt: skip
    said = {
        f"no sink heads on this text (mean weight on the sink below {NO_SINK:g})": quiet,
        f"no dormant token on this text (weight on the sink never {DORMANT:g} or more)": awake,
        "heads of several kv heads: only those of one kv head share the sink's value": mixed,
    }
    return [f"{_some(names)}: {what}." for what, names in said.items() if names]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"


def _check_names(units: Sequence[Unit]) -> None:
    """Results are kept by name: two units of one name would be added up in silence."""
    names = [unit.name for unit in units]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            "what is changed at once needs a name of its own",
            expected="sets that differ from each other and from the heads in first head or size",
            got=f"{', '.join(twice)} twice",
        )


@dataclass(frozen=True)
class _Plans:
    """Turns units and interventions into variants."""

    calibrated: Mapping[Head, HeadCalibration]
    keys: SinkKeys
    totals: _Totals

    def everywhere(self, units: Sequence[Unit], chosen: Sequence[Intervention]) -> list[Variant]:
        """Changes made at all tokens; the unchanged variant once for each layer that a variant may start in."""
        variants, checked = [], set()
        for unit in units:
            few = unit.role == "control" and len(chosen) > len(CORE)
            for intervention in _OF_CONTROLS if few else chosen:
                start = min(unit.heads.by_layer())
                if intervention.id != "C0" or start not in checked:
                    variants.append(self._variant(unit, intervention, "everywhere", None))
            checked.add(min(unit.heads.by_layer()))
        return variants

    def by_state(self, unit: Unit, needed: Mapping[str, Sequence[Intervention]]) -> Iterator[Variant]:
        """Changes made at the tokens of one state only, for states with enough tokens."""
        states = self.totals.states(unit.name, slice(None))
        for state, interventions in needed.items():
            where = torch.from_numpy(states[state])
            if int(where.sum()) >= FEWEST:
                yield from (self._variant(unit, change, state, where) for change in interventions)

    def _variant(self, unit: Unit, intervention: Intervention, at: str, where: Tensor | None) -> Variant:
        plan = {head: intervention.normalizer(self.calibrated[head]) for head in unit.heads}
        name = (unit.name, intervention.id, at)
        return Variant(name, unit.heads, Patch.of(plan, self.keys), intervention.alter, where)


def _part(rows: slice, chunk: Sequence[Variant]) -> str:
    return f"{rows.start}:" + ";".join("|".join(variant.name) for variant in chunk)


def _identity(model: Any, variants: Sequence[Variant], settings: Mapping[str, Any], test: PromptSet, batch_size: int,
              reuse: bool) -> dict[str, Any]:  # fmt: skip
    """What a run must share with an earlier one to go on from its journal."""
    # A sample of every parameter: two models may share any one of them.
    parameters = list(model.parameters())
    weights = sum(float(p.detach().flatten()[:: max(1, p.numel() // 1024)].double().norm()) for p in parameters)
    return {
        "prompts": test.fingerprint, "calibration": settings["calibration"]["fingerprint"], "batch_size": batch_size,
        "reuse": reuse, "skip_rows": settings["skip_rows"], "sink_keys": settings["sink_keys"],
        "model": [type(model).__name__, str(parameters[0].dtype), sum(p.numel() for p in parameters), weights],
        "sets": settings["sets"], "triggers": settings["triggers"],
        "interventions": settings["interventions"],
        "variants": _fingerprint("\n".join("|".join(v.name) for v in variants).encode()),
    }  # fmt: skip


def _fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def split(prompts: PromptSet, calibration: PromptSet | None) -> tuple[PromptSet, PromptSet]:
    """Calibration and test sequences: as given, or every fourth sequence set aside.

    Raises:
        InputError: They share a sequence, or there are too few.
    """
    if calibration is None:
        if len(prompts) < 4:
            raise InputError(
                "every fourth sequence is set aside for calibration",
                expected="at least 4 sequences, or calibration=...", got=len(prompts),
            )  # fmt: skip
        index = list(range(len(prompts)))
        return prompts.select(index[::4]), prompts.select([i for i in index if i % 4])
    if shared := prompts.shared(calibration.hashes):
        raise InputError("calibration and test overlap", expected="no shared sequence", got=_some(shared))
    return calibration, prompts


def _controls(activity: Activity, asked: Heads, skip_rows: int) -> list[Unit]:
    """The head with the least sink mass in each tested layer."""
    counted = activity.counted(skip_rows)
    mass = (activity.mass * counted).sum((1, 2)) / counted.sum()
    quiet = []
    for layer in asked.by_layer():
        rows = [
            (mass[row], head) for row, head in enumerate(activity.heads) if head.layer == layer and head not in asked
        ]
        quiet += [Unit(Heads([min(rows)[1]]), "control")] if rows else []
    return quiet


class _Totals:
    """Sums over the tokens of each state, by sequence: all that intervals need."""

    def __init__(
        self, activity: Activity, units: Sequence[Unit], skip_rows: int, marked: Mapping[Head, np.ndarray]
    ) -> None:
        index = {head: row for row, head in enumerate(activity.heads)}
        self.counted = activity.counted(skip_rows)
        self.units = {unit.name: unit for unit in units}
        self.mass = {u.name: activity.mass[[index[head] for head in u.heads]].mean(0) for u in units}
        self.trigger = {u.name: marked[u.heads[0]] for u in units if len(u.heads) == 1 and u.heads[0] in marked}

    def states(self, name: str, rows: slice) -> dict[str, np.ndarray]:
        mass, counted = self.mass[name][rows], self.counted[rows]
        found = {"dormant": counted & (mass >= DORMANT), "active": counted & (mass <= ACTIVE), "all": counted}
        found["mixed"] = counted & ~found["dormant"] & ~found["active"]
        return found | ({"trigger": counted & self.trigger[name][rows]} if name in self.trigger else {})

    def rows(self, rows: slice, name: tuple[str, ...], effects: Effects) -> Iterator[dict[str, Any]]:
        """One row a state and sequence; a change made at one state's tokens speaks of that state, and of all tokens."""
        unit, intervention, at = name
        values = {key: getattr(effects, key).double().cpu().numpy() for key in (*METRICS, "scale")}
        for state, keep in self.states(unit, rows).items():
            if state == "mixed" if at == "everywhere" else state not in (at, "all"):
                continue
            for offset, sequence in enumerate(range(rows.start, rows.stop)):
                sums = {key: float((value[offset] * keep[offset]).sum()) for key, value in values.items()}
                yield {"heads": unit, "intervention": intervention, "at": at, "tokens": state, "sequence": sequence,
                       "count": int(keep[offset].sum()), **sums}  # fmt: skip

    def frame(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        order = {name: place for place, name in enumerate(self.units)}
        frame = pd.DataFrame(rows)
        return frame.sort_values("heads", key=lambda names: names.map(order), kind="stable").reset_index(drop=True)

    def share(self) -> pd.DataFrame:
        everything = slice(0, len(self.counted))
        rows = []
        for name, unit in self.units.items():
            single = unit.heads[0] if len(unit.heads) == 1 else Head(-1, -1)
            mass = float(self.mass[name][self.counted].mean())
            for state, keep in self.states(name, everything).items():
                rows.append({"heads": name, "role": unit.role, "layer": single.layer, "head": single.head,
                             "sink_mass": mass, "tokens": state, "share": keep.sum() / self.counted.sum()})  # fmt: skip
        return pd.DataFrame(rows)


def _check_unchanged(long: pd.DataFrame) -> None:
    unchanged = long[(long.intervention == "C0") & (long.tokens == "all")]
    worst = float((unchanged.kl.abs() / unchanged["count"].clip(lower=1)).max())
    if not worst <= _CLEAN_KL:
        raise PatchNotAppliedError(
            "the unchanged variant differs from the clean run", expected=f"KL below {_CLEAN_KL:g}", got=f"{worst:.2g}"
        )


def _table(long: pd.DataFrame, share: pd.DataFrame, resamples: int, seed: int) -> pd.DataFrame:
    rows = []
    # The scale of the error is the clean head's variance over all tokens, the same for every state.
    whole = long[long.tokens == "all"].groupby(["heads", "intervention", "at"])[["scale", "count"]].sum()
    whole = whole.groupby("heads").first()
    for (name, intervention, at, state), group in long.groupby(["heads", "intervention", "at", "tokens"], sort=False):
        for metric in METRICS:
            factor = 1.0 if metric != "output_error" else float(whole.loc[name, "count"] / whole.loc[name, "scale"])
            interval = ratio_interval(group[metric] * factor, group["count"], resamples=resamples,
                                      rng=np.random.default_rng(seed))  # fmt: skip
            rows.append({"heads": name, "intervention": intervention, "at": at, "tokens": state,
                         "count": int(group["count"].sum()), "sequences": int((group["count"] > 0).sum()),
                         "metric": metric, **asdict(interval)})  # fmt: skip
    table = share.merge(pd.DataFrame(rows), on=["heads", "tokens"], how="right")
    return table[[name for name in Contrast.units if name in table]]


def _fits(calibrated: Mapping[Head, HeadCalibration]) -> pd.DataFrame:
    """What was fitted: one row a head and power, with the error on calibration tokens by state."""
    return pd.DataFrame(
        {
            "layer": head.layer,
            "head": head.head,
            **asdict(fit.normalizer),
            **{f"error_{state}": error for state, error in fit.error.items()},
            "sink_logit": c.sink_logit,
            "exit_logit": c.exit_logit,
        }
        for head, c in calibrated.items()
        for fit in c.relu.values()
    )
