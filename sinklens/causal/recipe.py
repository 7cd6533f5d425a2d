"""A recipe: which head runs on which normalizer, as a JSON file that brings the same patched model back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklens import normalizers
from sinklens.errors import InputError
from sinklens.normalizers import Normalizer
from sinklens.patch import patched
from sinklens.table import replacing, writable
from sinklens.vocabulary import Head, HeadLike, Heads, SinkKeys


@dataclass(frozen=True)
class Recipe:
    """A plan for :func:`sinklens.patched` that can be kept.

    Attributes:
        plan: The normalizer of every changed head.
        sink_first: How many of the first visible tokens the normalizers treat as the sink.
        model: What it was made for, in words.
    """

    plan: Mapping[Head, Normalizer]
    sink_first: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> Heads:
        return Heads(self.plan)

    @contextmanager
    def applied(self, model: object) -> Iterator[Heads]:
        """Run the model with these heads, ``generate`` included; on exit it is as before. See :func:`patched`."""
        if not self.plan:
            yield Heads([])
            return
        plan: dict[HeadLike, Normalizer] = {head: self.plan[head] for head in self.heads}
        with patched(model, plan, sink_keys=SinkKeys(first=self.sink_first)) as heads:
            yield heads

    def save(self, path: str | Path) -> Path:
        """Write the recipe as JSON; numbers read back exactly.

        Raises:
            InputError: The file cannot be written, or a normalizer is not one of sinklens'.
        """
        path = Path(path)
        described = {
            "recipe": 1, "model": dict(self.model), "sink_first": self.sink_first,
            "heads": {str(head): to_json(normalizer) for head, normalizer in self.plan.items()},
        }  # fmt: skip
        with writable(path.parent), replacing(path) as fresh:
            fresh.write_text(json.dumps(described, indent=1, default=str) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read back what :meth:`save` wrote.

        Raises:
            InputError: The file is missing, or is no recipe.
        """
        path = Path(path)
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            plan = {Heads.of(name)[0]: from_json(value) for name, value in described["heads"].items()}
            return cls(plan, int(described["sink_first"]), described["model"])
        except OSError as error:
            raise InputError("the recipe cannot be read", expected="a JSON file", got=f"{path}: {error}") from None
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise InputError(
                "this is no recipe", expected="what Recipe.save wrote", got=f"{path}: {type(error).__name__} {error}"
            ) from None


def to_json(normalizer: Normalizer) -> dict[str, Any]:
    """A normalizer as plain values: its name and its fields.

    Raises:
        InputError: It is not one of sinklens' own, so that a file could not bring it back.
    """
    name = type(normalizer).__name__
    if getattr(normalizers, name, None) is not type(normalizer):
        raise InputError("a recipe holds normalizers of sinklens", expected=", ".join(normalizers.__all__), got=name)
    values = {item.name: getattr(normalizer, item.name) for item in fields(normalizer)}
    return {"normalizer": name} | {
        key: to_json(value) if isinstance(value, Normalizer) else value.tolist() if isinstance(value, Tensor) else value
        for key, value in values.items()
    }


def from_json(described: Mapping[str, Any]) -> Normalizer:
    """A normalizer from :func:`to_json`.

    Raises:
        InputError: An unknown normalizer.
    """
    name = described["normalizer"]
    if name not in normalizers.__all__:
        raise InputError("unknown normalizer", expected=", ".join(normalizers.__all__), got=name)
    values = {
        key: from_json(value) if isinstance(value, dict) else torch.tensor(value) if isinstance(value, list) else value
        for key, value in described.items()
        if key != "normalizer"
    }
    made: Normalizer = getattr(normalizers, name)(**values)
    return made
