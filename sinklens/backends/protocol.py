"""What a backend is: how one route is attached to a real model, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from sinklens.attention import AttentionCall, AttentionResult, Route, attend
from sinklens.vocabulary import Site


class Backend(Protocol):
    """A model whose attention calls can be routed.

    Attributes:
        model: The user's model object.
        sites: Its attention computations, in call order; known once the model has run under a route.
        expected_sites: How many there should be, from the model's modules.
        served_by: Which seam serves it, for error messages and provenance.
    """

    served_by: str

    @property
    def model(self) -> nn.Module: ...

    @property
    def sites(self) -> tuple[Site, ...]: ...

    @property
    def expected_sites(self) -> int: ...

    def attach(self, route: Route) -> AbstractContextManager[CallLog]:
        """Put a route in front of every attention call until exit; what was there before is restored exactly."""

    def replaying(self, run: CleanRun, layer: int, copies: int) -> AbstractContextManager[None]:
        """Let the blocks below a site return what they returned in a clean run, repeated ``copies`` times.

        Raises:
            UnsupportedModelError: This backend cannot skip blocks.
        """

    def recording(self) -> AbstractContextManager[CleanRun]:
        """Keep every block's output of one forward pass for :meth:`replaying`."""

    def forward(self, inputs: Tensor, mask: Tensor | None = None, *, logits: bool = True) -> Tensor:
        """Run the model without a cache and return logits ``[batch, query, vocab]``, or the last hidden state."""

    def output_matrix(self, site: Site) -> Tensor:
        """The output projection of a site by head, ``[head, d_value, d_model]``, float32; the bias is left out."""


@dataclass
class CallLog:
    """How often each site was called while a route was attached."""

    calls: dict[int, int] = field(default_factory=dict)

    def count(self, site: Site) -> None:
        self.calls[site.layer] = self.calls.get(site.layer, 0) + 1


@dataclass
class CleanRun:
    """What each block of a model returned in one untouched forward pass, by block index."""

    outputs: dict[int, object] = field(default_factory=dict)


@dataclass
class RouteStack:
    """The routes attached to one model, outermost first, and the log of each."""

    routes: list[tuple[Route, CallLog]] = field(default_factory=list)

    def run(self, call: AttentionCall) -> AttentionResult:
        """Pass a call through the routes, the one attached last first, and evaluate it at the end."""

        evaluated: list[AttentionResult] = []
        result = self._step(len(self.routes) - 1, call, evaluated)
        # A hooked model computes its own output from the call; it must be told when the call does not say it all.
        return result if any(result is known for known in evaluated) else replace(result, replaced=True)

    def _step(self, depth: int, call: AttentionCall, evaluated: list[AttentionResult]) -> AttentionResult:
        # A method, not a closure that names itself: that would be a cycle, and keep every layer's tensors alive until
        # the garbage collector comes by.
        if depth < 0:
            evaluated.append(attend(call))
            return evaluated[-1]
        route, log = self.routes[depth]
        log.count(call.site)
        return route(call, lambda passed: self._step(depth - 1, passed, evaluated))

    @contextmanager
    def pushed(self, route: Route) -> Iterator[CallLog]:
        """Attach one more route for the time of a with-block."""
        entry = (route, CallLog())
        self.routes.append(entry)
        try:
            yield entry[1]
        finally:
            # By identity: equal routes may be attached twice, and inner blocks may have been left out of order.
            self.routes = [other for other in self.routes if other is not entry]


def device_of(model: nn.Module) -> torch.device:
    """Where a model expects its inputs."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
