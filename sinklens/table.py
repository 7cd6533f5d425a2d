"""Results: a table of heads with units, settings and provenance, saved as Parquet and JSON, loaded back the same."""

from __future__ import annotations

import html
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pandas as pd

from sinklens.errors import InputError
from sinklens.vocabulary import Head, Heads

R = TypeVar("R", bound="HeadTable")


@dataclass(frozen=True, eq=False)
class HeadTable:
    """A table with one or more rows a head; the shared base of all results.

    Attributes:
        frame: The table; every frame holds ``layer`` and ``head``.
        settings: What the caller chose, seeds included.
        provenance: Model, tokenizer, prompts, versions, time.
        frames: Further tables of the same result, by name.
    """

    kind: ClassVar[str] = "heads"
    units: ClassVar[Mapping[str, str]] = {"layer": "index from 0", "head": "query head, from 0"}

    frame: pd.DataFrame = field(repr=False)
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    frames: Mapping[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    @property
    def heads(self) -> Heads:
        """The heads of the table, in row order."""
        return Heads.of(
            Head(int(layer), int(head)) for layer, head in zip(self.frame.layer, self.frame["head"], strict=True)
        )

    def to_pandas(self) -> pd.DataFrame:
        """A copy of the table."""
        return self.frame.copy()

    def save(self, folder: str | Path) -> Path:
        """Write ``<kind>.parquet`` and ``<kind>.json`` into a folder, each complete or not at all.

        Raises:
            InputError: The folder cannot be written.
        """
        folder = Path(folder)
        described = {
            "kind": self.kind, "settings": dict(self.settings), "provenance": dict(self.provenance),
            "units": {name: unit for name, unit in self.units.items() if name in self.frame},
            "frames": sorted(self.frames),
        }  # fmt: skip
        with writable(folder):
            for name, frame in {
                self.kind: self.frame,
                **{f"{self.kind}.{n}": f for n, f in self.frames.items()},
            }.items():
                with replacing(folder / f"{name}.parquet") as path:
                    frame.to_parquet(path, index=False)
            with replacing(folder / f"{self.kind}.json") as path:
                path.write_text(
                    json.dumps(described, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8"
                )
        return folder

    @classmethod
    def load(cls: type[R], folder: str | Path) -> R:
        """Read back what :meth:`save` wrote.

        Raises:
            InputError: The folder holds no such result.
        """
        folder = Path(folder)
        described_at = folder / f"{cls.kind}.json"
        if not described_at.is_file():
            raise InputError(f"no {cls.kind} result here", expected=f"a folder with {cls.kind}.json", got=folder)
        described = json.loads(described_at.read_text(encoding="utf-8"))
        frames = {name: pd.read_parquet(folder / f"{cls.kind}.{name}.parquet") for name in described["frames"]}
        frame = pd.read_parquet(folder / f"{cls.kind}.parquet")
        return cls(frame, described["settings"], described["provenance"], frames)

    def reading(self) -> str:
        """One sentence that says what the table shows."""
        return f"{len(self.heads)} heads"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reading()})"

    def preview(self) -> pd.DataFrame:
        """What a notebook shows of the table."""
        return self.frame

    def _repr_html_(self) -> str:
        shown = self.preview()
        heads = "".join(
            f"<th>{html.escape(str(name))}<br><small>{html.escape(self.units.get(str(name), ''))}</small></th>"
            for name in shown
        )
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_cell(value))}</td>' for value in row)}</tr>"
            for row in shown.head(_PREVIEWED).itertuples(index=False)
        )
        rest = len(self.frame) - min(len(shown), _PREVIEWED)
        more = (
            f"<p>{rest} more rows: <code>.frame</code> holds all, <code>.plot()</code> draws them.</p>" if rest else ""
        )
        return f"<p>{html.escape(self.reading())}</p><table><tr>{heads}</tr>{rows}</table>{more}"


_PREVIEWED = 12


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write under a temporary name in the same folder and rename at the end: never a half-written file."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # Temporary files are private by default; results are as readable as any other file.
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Make a folder, and turn a refusal of the file system into one clear error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError("the output folder cannot be written", expected="a writable folder",
                         got=f"{folder} ({error.strerror or error})") from None  # fmt: skip


def check_writable(folder: Path) -> None:
    """Refuse an output folder that could not be made, before a long run and without making it.

    Raises:
        InputError: A file is in the way, or the folder belongs to somebody else.
    """
    nearest = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise InputError("the output folder cannot be written", expected="a writable folder", got=folder)


def provenance(model: object, prompts: Mapping[str, Any]) -> dict[str, Any]:
    """Where numbers come from: model and revision, prompts, versions, time."""
    config = getattr(model, "config", None) or getattr(model, "cfg", None)
    name = getattr(config, "_name_or_path", None) or getattr(config, "model_name", None) or type(model).__name__
    parameter = next(iter(getattr(model, "parameters", lambda: iter(()))()), None)
    return {
        "model": Path(str(name)).name,
        "model_class": type(model).__name__,
        "revision": getattr(config, "_commit_hash", None),
        "dtype": str(getattr(parameter, "dtype", "unknown")).removeprefix("torch."),
        "prompts": dict(prompts),
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}},
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


_PACKAGES = ("sinklens", "torch", "transformers", "transformer-lens")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
