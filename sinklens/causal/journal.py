"""A journal of finished parts: a long run that was killed goes on where it stopped, to the same numbers bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sinklens.errors import InputError
from sinklens.table import writable


class Journal:
    """Finished parts in the order they were asked for, each on disk before the next begins.

    One JSON line a part; Python writes floats so that they read back exactly. A line cut off by a kill is dropped.
    """

    def __init__(self, parts: dict[str, list[dict[str, Any]]], file: IO[str] | None) -> None:
        self._parts, self._file = parts, file

    @classmethod
    @contextmanager
    def opened(cls, path: str | Path | None, identity: Mapping[str, Any]) -> Iterator[Journal]:
        """Open a journal, or one in memory without a path.

        Args:
            path: The file; made if missing.
            identity: What a run must share with the one that began the journal.

        Raises:
            InputError: The journal belongs to another run, or the file cannot be written.
        """
        if path is None:
            yield cls({}, None)
            return
        path = Path(path)
        with writable(path.parent):
            parts = _read(path, identity)
            # Rewritten whole under another name: a cut-off last line must not stay in front of the next one.
            fresh = path.with_name(f"{path.name}.tmp")
            lines = [json.dumps({"run": identity}), *(json.dumps({"part": k, "rows": v}) for k, v in parts.items())]
            fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
            fresh.replace(path)
            with path.open("a", encoding="utf-8") as file:
                yield cls(parts, file)

    def has(self, part: str) -> bool:
        """Whether a part is finished."""
        return part in self._parts

    def add(self, part: str, rows: Sequence[dict[str, Any]]) -> None:
        """Keep a finished part."""
        self._parts[part] = list(rows)
        if self._file is not None:
            self._file.write(json.dumps({"part": part, "rows": self._parts[part]}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order of the parts."""
        return [row for rows in self._parts.values() for row in rows]


def _read(path: Path, identity: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    if not path.is_file():
        return {}
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not records:
        return {}
    found = records[0].get("run")
    if found != json.loads(json.dumps(identity)):
        found = found if isinstance(found, dict) else {}
        differing = sorted(key for key in identity if found.get(key) != json.loads(json.dumps(identity[key])))
        raise InputError(
            "the journal here belongs to another run", expected=f"the same {', '.join(differing)}",
            got=f"{path}; delete it or choose another folder",
        )  # fmt: skip
    return {record["part"]: record["rows"] for record in records[1:]}
