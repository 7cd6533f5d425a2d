"""Bigram-Backcopy (arXiv 2410.13835): a token-level task in which it is known which tokens wake a head.

A Markov chain over V token ids behind BOS (id 0). After an ordinary token the next one is drawn from that token's row
of a transition table; after a *trigger* token the next one repeats the token before the trigger. A small language model
solves it with its embedding (the table) and a head that sleeps until it meets a trigger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from sinklens.errors import InputError

BOS = 0


@dataclass(frozen=True, eq=False)
class BackcopyBatch:
    """Sequences of the task.

    Attributes:
        inputs: Token ids ``[*model, batch, pos]``, BOS first.
        next: The true distribution of the token after each position, ``[*model, batch, pos, vocab]``.
        triggers: The trigger ids.
    """

    inputs: Tensor
    next: Tensor
    triggers: Tensor

    @property
    def at_trigger(self) -> Tensor:
        """True where the token is a trigger, ``[*model, batch, pos]``."""
        return torch.isin(self.inputs, self.triggers)


@dataclass(frozen=True)
class BigramBackcopy:
    """A bigram chain whose trigger tokens ask for the token before them.

    Attributes:
        tokens: Ordinary and trigger token ids together, without BOS.
        triggers: How many of them, the first ids after BOS, are triggers.
        length: Sequence length, BOS included.
        concentration: Dirichlet parameter of the transition table; small: predictable chains.
        table_seed: Seed of the transition table.
        d_model: Width of the model that learns it.
    """

    tokens: int = 32
    triggers: int = 3
    length: int = 32
    concentration: float = 1.0
    table_seed: int = 0
    d_model: int = 48

    def __post_init__(self) -> None:
        if not 1 <= self.triggers < self.tokens - 1:
            raise InputError(
                "some tokens are triggers, and at least two are not",
                expected=f"1 <= triggers < {self.tokens - 1}",
                got=self.triggers,
            )
        if self.length < 4 or not self.concentration > 0:
            raise InputError(
                "a chain has a length and a table",
                expected="length >= 4 and concentration > 0",
                got=(self.length, self.concentration),
            )

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.d_model

    @property
    def vocabulary(self) -> int:
        """Token ids, BOS included."""
        return self.tokens + 1

    @property
    def trigger_ids(self) -> tuple[int, ...]:
        """The tokens that wake the head."""
        return tuple(range(1, self.triggers + 1))

    def words(self) -> tuple[str, ...]:
        """A name for each token id: ``BOS``, ``T1``.. for triggers, ``a1``.. for the others."""
        others = range(1, self.tokens - self.triggers + 1)
        return ("BOS", *(f"T{i}" for i in self.trigger_ids), *(f"a{i}" for i in others))

    def settings(self) -> dict[str, Any]:
        """What makes two tasks the same, as plain values."""
        return {"task": type(self).__name__, **asdict(self)}

    @cached_property
    def table(self) -> Tensor:
        """Transition probabilities ``[from, to]``; BOS is never a target, and rows of triggers are not used."""
        generator = Generator().manual_seed(self.table_seed)
        size = self.vocabulary
        gamma = torch._standard_gamma(torch.full((size, size), self.concentration), generator)
        gamma[:, BOS] = 0.0
        # Triggers come often enough to be learned: a tenth of each row, whatever the chain.
        gamma[:, 1 : self.triggers + 1] = gamma.sum(-1, keepdim=True) / (9 * self.triggers)
        return gamma / gamma.sum(-1, keepdim=True)

    def sample(self, size: int, generator: Generator | Sequence[Generator]) -> BackcopyBatch:
        """Draw sequences; several generators give a leading model axis of independent batches."""
        several = not isinstance(generator, Generator)
        sources: Sequence[Generator] = generator if several else (generator,)  # type: ignore[assignment]
        drawn = torch.stack([torch.rand(size, self.length, generator=source) for source in sources])
        tokens, chances = self._chain(drawn)
        return BackcopyBatch(
            tokens if several else tokens[0], chances if several else chances[0], torch.tensor(self.trigger_ids)
        )

    def _chain(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        table = self.table
        token = torch.full(uniform.shape[:2], BOS)  # [model, batch]
        previous, tokens, chances = token, [], []
        for step in range(self.length):
            asked = (token >= 1) & (token <= self.triggers)
            copied = torch.nn.functional.one_hot(previous, self.vocabulary).float()
            chance = torch.where(asked[..., None], copied, table[token])  # [model, batch, vocab]
            tokens.append(token)
            chances.append(chance)
            following = (chance.cumsum(-1) < uniform[..., step, None]).sum(-1).clamp(max=self.vocabulary - 1)
            previous, token = token, following
        return torch.stack(tokens, -1), torch.stack(chances, -2)

    def score(self, prediction: Tensor, batch: BackcopyBatch, *, residual: bool) -> tuple[Tensor, Tensor]:
        """Cross-entropy against the true distribution, and how far it is above the chain's own entropy, in nats."""
        log = torch.log_softmax(prediction, -1)
        loss = -(batch.next * log).sum(-1).mean((-1, -2))
        entropy = -torch.xlogy(batch.next, batch.next).sum(-1).mean((-1, -2))
        return loss, loss.detach() - entropy
