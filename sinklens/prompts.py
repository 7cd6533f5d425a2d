"""Prompts: token sequences with their mask, where they come from, and what stands at their start.

Tokenized once, here; every other part receives ids. A sequence is the unit of inference.
"""

from __future__ import annotations

import hashlib
import html
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinklens.errors import InputError, hub_errors

BosPolicy = Literal["auto", "always", "never"]
BosCount = Literal["none", "one", "two"]


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Token sequences ready for a model.

    Attributes:
        tokens: Token ids ``[sequence, position]``, right-padded; or float inputs ``[sequence, position, width]``.
        mask: True at real tokens, ``[sequence, position]``.
        source: Where the sequences come from, in words.
        names: A name for each sequence.
        domains: A domain for each sequence, e.g. ``"code"``.
        tokenizer: The tokenizer that made them, if any.
        truncated: How many sequences were cut to the length.
        labels: Text of each position ``[sequence][position]`` where there is no tokenizer.
    """

    tokens: Tensor
    mask: Tensor
    source: str
    names: tuple[str, ...]
    domains: tuple[str, ...]
    tokenizer: Any = field(default=None, repr=False)
    truncated: int = 0
    labels: tuple[tuple[str, ...], ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.tokens.shape[:2] != self.mask.shape or self.mask.shape[0] == 0:
            raise InputError(
                "tokens and mask speak of the same positions of at least one sequence",
                expected="shapes [sequence, position]",
                got=f"{tuple(self.tokens.shape)} and {tuple(self.mask.shape)}",
            )
        shortest = int(self.mask.sum(-1).min())
        if shortest < 2:
            raise InputError(
                "a prompt needs a token and something before it",
                expected="at least 2 tokens",
                got=f"{shortest} in {self.names[int(self.mask.sum(-1).argmin())]}",
            )

    # ---- makers ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str],
        tokenizer: Any,
        *,
        length: int = 256,
        bos: BosPolicy = "auto",
        source: str = "texts",
        names: Sequence[str] | None = None,
        domains: Sequence[str] | None = None,
    ) -> PromptSet:
        """One sequence a text, cut to ``length`` tokens.

        Args:
            texts: The texts; a single string counts as one text.
            tokenizer: A transformers tokenizer.
            length: Largest number of tokens, BOS included.
            bos: ``auto`` puts the tokenizer's BOS token first if it has one and the text does not begin with it;
                ``always`` demands one; ``never`` takes it away.
            source: Where the texts come from, for the record.
            names: A name for each text.
            domains: A domain for each text.

        Raises:
            InputError: No texts, a text with fewer than two tokens, or ``always`` without a BOS token.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            raise InputError("there is nothing to tokenize", expected="at least one text", got="none")
        rows = [_with_bos(_encode(tokenizer, text), tokenizer, bos) for text in texts]
        return cls._of_rows(rows, tokenizer, length, source, names, domains)

    @classmethod
    def from_tokens(cls, tokens: Tensor, mask: Tensor | None = None, *, tokenizer: Any = None, source: str = "tokens",
                    names: Sequence[str] | None = None) -> PromptSet:  # fmt: skip
        """Sequences that are tokenized already, ``[sequence, position]``, padded on either side where mask is False."""
        if tokens.ndim != 2 or tokens.dtype.is_floating_point:
            raise InputError("token ids form a table", expected="integers [sequence, position]", got=_shape(tokens))
        names = tuple(names or (f"{source}-{i}" for i in range(len(tokens))))
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        return cls(tokens.long().clone(), mask.clone(), source, names, ("",) * len(tokens), tokenizer)

    @classmethod
    def from_inputs(cls, inputs: Tensor, labels: Sequence[Sequence[str]], *, source: str = "inputs") -> PromptSet:
        """Float inputs ``[sequence, position, width]`` of a toy model, with a text label for every position."""
        if inputs.ndim != 3:
            raise InputError("inputs form a box", expected="floats [sequence, position, width]", got=_shape(inputs))
        names = tuple(f"{source}-{i}" for i in range(len(inputs)))
        mask = torch.ones(inputs.shape[:2], dtype=torch.bool)
        written = tuple(tuple(row) for row in labels)
        return cls(inputs.clone(), mask, source, names, ("",) * len(inputs), labels=written)

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: Any, *, length: int = 256, limit: int | None = None,
                  bos: BosPolicy = "auto") -> PromptSet:  # fmt: skip
        """A UTF-8 text file, tokenized whole and cut into consecutive sequences of ``length`` tokens.

        Raises:
            InputError: The file is missing, empty, not UTF-8, or too short for one sequence.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError("a text file is UTF-8", expected="UTF-8", got=f"{path} ({error.reason})") from None
        except OSError as error:
            raise InputError("the text file cannot be read", expected="a file", got=f"{path} ({error})") from None
        if not text.strip():
            raise InputError("a text file holds text", expected="at least one word", got=f"{path} is empty")
        chunks = _chunks(_encode(tokenizer, text), tokenizer, length, bos)
        rows = list(islice(chunks, limit))
        if not rows:
            raise InputError(
                "the text fills no sequence", expected=f"at least {length} tokens", got=f"fewer, in {path.name}"
            )
        return cls._of_rows(rows, tokenizer, length, f"file {path.name}", None, None)

    @classmethod
    def from_dataset(cls, name: str, tokenizer: Any, *, column: str = "text", split: str = "train",
                     config: str | None = None, length: int = 256, limit: int = 64,
                     bos: BosPolicy = "auto", **load: Any) -> PromptSet:  # fmt: skip
        """A text column of a HuggingFace dataset, streamed: documents are joined and cut into full sequences.

        Args:
            name: Dataset name, or a builder such as ``"text"`` or ``"json"`` with ``data_files=...``.
            tokenizer: A transformers tokenizer.
            column: The text column.
            split: Which split.
            config: The dataset's configuration.
            length: Tokens a sequence, BOS included.
            limit: How many sequences; the stream stops there.
            bos: See :meth:`from_texts`.
            **load: Passed to ``datasets.load_dataset``.

        Raises:
            InputError: No such column, or too little text for one sequence.
        """
        from datasets import load_dataset
        from huggingface_hub import HfApi

        failures: tuple[type[Exception], ...] = (RuntimeError, *hub_errors())
        try:
            if "data_files" not in load and not Path(name).exists():
                # Asked once: loading itself would try again for a minute before it gives up.
                HfApi().dataset_info(name, timeout=10)
            stream = load_dataset(name, config, split=split, streaming=True, **load)
        except failures as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
            raise InputError(
                "the dataset cannot be loaded", got=f"{name!r}, split {split!r} ({reason})",
                expected="a dataset of the hub while online, a local folder, or a text file given as prompts",
            ) from None  # fmt: skip

        def ids() -> Iterator[int]:
            for record in stream:
                if column not in record:
                    raise InputError("the dataset lacks the text column", expected=column, got=sorted(record))
                yield from _encode(tokenizer, record[column])

        rows = list(islice(_chunks(ids(), tokenizer, length, bos), limit))
        if not rows:
            raise InputError("the dataset fills no sequence", expected=f"{length} tokens", got="fewer")
        return cls._of_rows(rows, tokenizer, length, f"dataset {name}", None, None)

    @classmethod
    def random(cls, vocabulary: int, *, count: int = 16, length: int = 64, bos: int | None = None,
               generator: torch.Generator | None = None, tokenizer: Any = None) -> PromptSet:  # fmt: skip
        """Uniformly random token ids, after an optional BOS id: text without content."""
        generator = generator or torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (count, length), generator=generator)
        if bos is not None:
            tokens[:, 0] = bos
        return cls.from_tokens(tokens, tokenizer=tokenizer, source="random tokens")

    @classmethod
    def repeated(cls, vocabulary: int, *, count: int = 16, length: int = 64, bos: int | None = None,
                 generator: torch.Generator | None = None, tokenizer: Any = None) -> PromptSet:  # fmt: skip
        """One random token a sequence, repeated to the length: only the position differs."""
        generator = generator or torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (count, 1), generator=generator).repeat(1, length)
        if bos is not None:
            tokens[:, 0] = bos
        return cls.from_tokens(tokens, tokenizer=tokenizer, source="repeated tokens")

    @classmethod
    def builtin(cls, tokenizer: Any, *, length: int = 256, domains: Sequence[str] | None = None,
                limit: int | None = None, bos: BosPolicy = "auto") -> PromptSet:  # fmt: skip
        """The passages that come with sinklens: news, fiction, dialogue, science, code, several languages, and more.

        With a ``limit`` the domains take turns, so that a small set is still mixed.
        """
        records = _passages()
        known = sorted({record["domain"] for record in records})
        wanted = known if domains is None else list(domains)
        if unknown := sorted(set(wanted) - set(known)):
            raise InputError("unknown domain", expected=", ".join(known), got=", ".join(unknown))
        chosen = [record for record in records if record["domain"] in wanted]
        turns = {record["id"]: turn for turn, record in _turns(chosen)}
        chosen = sorted(chosen, key=lambda record: turns[record["id"]])[:limit]
        columns = {key: [record[key] for record in chosen] for key in ("text", "id", "domain")}
        return cls.from_texts(columns["text"], tokenizer, length=length, bos=bos, source="built-in passages",
                              names=columns["id"], domains=columns["domain"])  # fmt: skip

    @classmethod
    def _of_rows(cls, rows: list[list[int]], tokenizer: Any, length: int, source: str,
                 names: Sequence[str] | None, domains: Sequence[str] | None) -> PromptSet:  # fmt: skip
        _check_length(length)
        truncated = sum(len(row) > length for row in rows)
        rows = [row[:length] for row in rows]
        width = max(map(len, rows))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        tokens = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
        names = tuple(names or (f"{source}-{i}" for i in range(len(rows))))
        made = cls(tokens, mask, source, names, tuple(domains or ("",) * len(rows)), tokenizer, truncated)
        if made.bos == "two":
            doubled = [int(i) for i in made._bos_counts().gt(1).nonzero()]
            warnings.warn(f"two BOS tokens at positions 0 and 1 of sequences {doubled[:8]}: was the text templated "
                          "already? Use bos='never'.", stacklevel=3)  # fmt: skip
        return made

    # ---- facts ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Positions of the longest sequence."""
        return self.tokens.shape[1]

    @property
    def starts(self) -> Tensor:
        """Index of each sequence's first real token, ``[sequence]``."""
        return self.mask.int().argmax(-1)

    @property
    def bos(self) -> BosCount:
        """How many BOS tokens stand at the start of the sequences (the most common count)."""
        counts = self._bos_counts()
        kinds: tuple[BosCount, ...] = ("none", "one", "two")
        return "two" if bool(counts.gt(1).any()) else kinds[int(counts.float().median())]

    def _bos_counts(self) -> Tensor:
        bos = bos_id(self.tokenizer)
        if bos is None or self.tokens.ndim != 2:
            return torch.zeros(len(self), dtype=torch.long)
        rows = torch.arange(len(self))
        first = self.tokens[rows, self.starts] == bos
        second = self.tokens[rows, (self.starts + 1).clamp(max=self.length - 1)] == bos
        return first.long() + (first & second).long()

    @property
    def fingerprint(self) -> str:
        """A short hash of tokens and mask: equal sets, equal fingerprint."""
        content = self.tokens.masked_fill(~self.mask.view(*self.mask.shape, *(1,) * (self.tokens.ndim - 2)), 0)
        digest = hashlib.sha256(content.contiguous().numpy().tobytes() + self.mask.numpy().tobytes())
        return digest.hexdigest()[:12]

    @property
    def hashes(self) -> list[str]:
        """A short hash of each sequence's real tokens: equal text, equal hash, however it is padded."""
        rows = (row[keep].contiguous() for row, keep in zip(self.tokens, self.mask, strict=True))
        return [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:12] for row in rows]

    def shared(self, hashes: Iterable[str]) -> list[str]:
        """Names of the sequences whose text is among these :attr:`hashes`."""
        known = set(hashes)
        return [name for name, value in zip(self.names, self.hashes, strict=True) if value in known]

    def token(self, sequence: int, position: int) -> str:
        """The text of one token."""
        if self.labels is not None:
            return self.labels[sequence][position]
        number = int(self.tokens[sequence, position])
        return str(number) if self.tokenizer is None else str(self.tokenizer.decode([number]))

    def facts(self) -> dict[str, Any]:
        """What is recorded with every result: source, sizes, BOS, truncation, tokenizer, fingerprint."""
        name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
        first = self.token(0, int(self.starts[0]))
        return {
            "source": self.source, "sequences": len(self), "length": self.length,
            "tokens": int(self.mask.sum()), "bos": self.bos, "first_token": first, "truncated": self.truncated,
            "padding": "left" if bool(self.starts.any()) else "right" if not bool(self.mask.all()) else "none",
            "tokenizer": Path(name).name if self.tokenizer is not None else "none", "fingerprint": self.fingerprint,
        }  # fmt: skip

    # ---- parts ----------------------------------------------------------------------------------------------------

    def select(self, sequences: Sequence[int] | Tensor | slice) -> PromptSet:
        """Some of the sequences, in the given order."""
        index = torch.arange(len(self))[sequences].tolist()
        labels = None if self.labels is None else tuple(self.labels[i] for i in index)
        return replace(self, tokens=self.tokens[index], mask=self.mask[index], labels=labels,
                       names=tuple(self.names[i] for i in index),
                       domains=tuple(self.domains[i] for i in index))  # fmt: skip

    def batches(self, size: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Consecutive batches: which sequences, tokens, and the mask (None when nothing is padded)."""
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            mask = self.mask[rows]
            yield rows, self.tokens[rows], None if bool(mask.all()) else mask.long()

    def __repr__(self) -> str:
        return f"PromptSet({len(self)} sequences of up to {self.length} tokens, {self.source}, {self.bos} BOS)"

    def _repr_html_(self) -> str:
        facts = self.facts()
        facts["first_token"] = repr(facts["first_token"])  # it may be blank, or a line break
        rows = "".join(
            f"<tr><th>{key.replace('_', ' ')}</th><td>{html.escape(str(value))}</td></tr>"
            for key, value in facts.items()
        )
        return f"<table><caption>PromptSet</caption>{rows}</table>"


def bos_id(tokenizer: Any) -> int | None:
    """The id that opens a sequence: BOS, or CLS where the tokenizer has that instead."""
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else getattr(tokenizer, "cls_token_id", None)


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Length warnings speak of the model; a whole file is cut into sequences afterwards.
    return list(tokenizer(text, verbose=False)["input_ids"])


def _with_bos(row: list[int], tokenizer: Any, bos: BosPolicy) -> list[int]:
    opening = bos_id(tokenizer)
    if bos == "never":
        while row and row[0] == opening:
            row = row[1:]
        return row
    if opening is None:
        if bos == "always":
            raise InputError("the tokenizer has no BOS token", expected="bos='auto' or 'never'", got="bos='always'")
        return row
    return row if row[:1] == [opening] else [opening, *row]


def _check_length(length: int) -> None:
    if length < 2:
        raise InputError("a sequence holds at least two tokens", expected="length >= 2", got=length)


def _chunks(ids: Iterable[int], tokenizer: Any, length: int, bos: BosPolicy) -> Iterator[list[int]]:
    """Consecutive full sequences; special tokens inside the stream are kept out of the chunks' middles."""
    _check_length(length)
    opening = bos_id(tokenizer)
    special = {number for number in (opening, getattr(tokenizer, "sep_token_id", None)) if number is not None}
    body = (number for number in ids if number not in special)
    prefix = [] if bos == "never" or opening is None else [opening]
    while len(chunk := list(islice(body, length - len(prefix)))) == length - len(prefix):
        yield prefix + chunk


def _passages() -> list[dict[str, str]]:
    text = resources.files("sinklens").joinpath("data/passages.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _turns(records: list[dict[str, str]]) -> Iterator[tuple[int, dict[str, str]]]:
    seen: dict[str, int] = {}
    for record in records:
        turn = seen[record["domain"]] = seen.get(record["domain"], -1) + 1
        yield turn, record


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
