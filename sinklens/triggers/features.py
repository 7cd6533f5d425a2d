"""Features of tokens: the declared vocabulary from which the name of a trigger is chosen.

A feature is one small function from a :class:`TokenTable` to a boolean track ``[sequence, position]``. *Query* features
speak of the token at which the head attends, *context* features of what came before it. Position and domain are not
features: position is a stratum of every effect, and a domain is constant within a sequence, of which a within-sequence
null can say nothing.

To add one: write the function and pass ``Feature(name, side, words, function)`` to ``find_triggers(features=...)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sinklens.errors import InputError
from sinklens.prompts import PromptSet

Side = Literal["query", "context"]
Track: TypeAlias = "NDArray[np.bool_]"


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The tokens of a prompt set as numbers and texts.

    Attributes:
        codes: Compact token number ``[sequence, position]``; -1 at padding.
        texts: Text of each compact number.
        ids: Vocabulary id of each compact number; -1 where the prompts are not made of ids.
    """

    codes: np.ndarray
    texts: tuple[str, ...]
    ids: np.ndarray

    @classmethod
    def of(cls, prompts: PromptSet) -> TokenTable:
        """Number the real tokens of a prompt set: by id, or by label where inputs are vectors."""
        real = prompts.mask.numpy()
        codes = np.full(real.shape, -1)
        if prompts.labels is not None:
            words = np.array([[prompts.token(s, p) for p in range(real.shape[1])] for s in range(len(real))])
            labels, codes[real] = np.unique(words[real], return_inverse=True)
            return cls(codes, tuple(map(str, labels)), np.full(len(labels), -1))
        ids, codes[real] = np.unique(prompts.tokens.numpy()[real], return_inverse=True)
        tokenizer = prompts.tokenizer
        texts = [str(i) if tokenizer is None else str(tokenizer.decode([int(i)])) for i in ids]
        return cls(codes, tuple(texts), ids)

    @property
    def real(self) -> Track:
        """Where there is a token, ``[sequence, position]``."""
        return self.codes >= 0

    def where(self, test: Callable[[str], bool]) -> Track:
        """Tokens whose text passes a test; each distinct text is tested once."""
        passes = np.array([*map(test, self.texts), False], dtype=bool)
        return passes[self.codes]

    def back(self, track: Track, steps: int) -> Track:
        """A track moved to the right: true where it was true ``steps`` tokens earlier."""
        moved = np.zeros_like(track)
        moved[:, steps:] = track[:, : track.shape[1] - steps]
        return moved & self.real

    def counts(self) -> np.ndarray:
        """How often each compact number occurs."""
        return np.bincount(self.codes[self.real], minlength=len(self.texts))


@dataclass(frozen=True)
class Feature:
    """A named property of a token.

    Attributes:
        name: Unique short name, e.g. ``token ' and'``.
        side: Whether it speaks of the attending token or of its context.
        words: How it reads in a report.
        track: Where it holds.
        token: Vocabulary id it stands for, where it is about one token.
        offset: How many tokens before the attending one the token stands that it speaks of.
    """

    name: str
    side: Side
    words: str
    track: Callable[[TokenTable], Track] = field(repr=False, compare=False)
    token: int | None = None
    offset: int = 0


# ---- one token ------------------------------------------------------------------------------------------------------


def tokens_at(offset: int, words: str) -> Callable[[TokenTable, int], list[Feature]]:
    """The family of features "the token ``offset`` back is this one", for tokens in enough sequences."""

    def family(table: TokenTable, min_sequences: int) -> list[Feature]:
        return [_one_token(table, code, offset, words) for code in _widespread(table, min_sequences)]

    return family


def _widespread(table: TokenTable, min_sequences: int) -> list[int]:
    present = [np.unique(row[row >= 0]) for row in table.codes]
    spread = np.bincount(np.concatenate(present), minlength=len(table.texts))
    return [int(code) for code in np.flatnonzero(spread >= min_sequences)]


def _one_token(table: TokenTable, code: int, offset: int, words: str) -> Feature:
    text, number = table.texts[code], int(table.ids[code])
    key = number if number >= 0 else text

    def track(other: TokenTable) -> Track:
        # Other prompts number their tokens differently: the id, or the text where there is none, is the identity.
        known = list(other.ids) if number >= 0 else list(other.texts)
        held = other.codes == known.index(key) if key in known else np.zeros(other.codes.shape, dtype=bool)
        return other.back(held, offset) if offset else held

    quoted = spoken(text)
    side: Side = "context" if offset else "query"
    # Two ids can share one text (pieces of characters); the id keeps their names apart.
    label = f"{quoted} (id {number})" if number >= 0 and table.texts.count(text) > 1 else quoted
    name = f"token {label}" if not words else f"{words} {label}"
    return Feature(name, side, f"{words} {label}".strip(), track, number if number >= 0 else None, offset)


def spoken(text: str) -> str:
    """A token as it reads in a sentence: ``newline`` for line breaks, quoted otherwise."""
    if text and not text.strip("\n"):
        return "newline" if len(text) == 1 else f"{len(text)} newlines"
    return f"'{text}'" if text.isprintable() else repr(text)


# ---- classes of tokens ----------------------------------------------------------------------------------------------

_PUNCTUATION = re.compile(r"\s*[^\w\s]+\s*")
_OPENING, _CLOSING = re.compile(r"[(\[{]"), re.compile(r"[)\]}]")

CLASSES: dict[str, Callable[[str], bool]] = {
    "punctuation": lambda text: bool(_PUNCTUATION.fullmatch(text)),
    "digit": lambda text: bool(text.strip()) and text.strip().isdigit(),
    "newline": lambda text: "\n" in text,
    "space-prefixed word": lambda text: text[:1] == " " and text[1:2].isalpha(),
    "capitalized": lambda text: text.strip()[:1].isupper(),
    "word continuation": lambda text: text[:1].isalpha(),
    "sentence end": lambda text: bool(re.fullmatch(r"\s*[.!?]+[\"'”’)]*\s*", text)),
}
"""Tests on a token's text."""

WORDS: dict[str, str] = {
    "pronoun": "i you he she it we they me him her us them himself herself itself themselves who",
    "possessive": "my your his her its our their whose",
    "conjunction": "and or but nor yet so",
    "preposition": "of in to for on with at by from as into through during against between about over under after "
    "before within without around among towards toward upon",
    "determiner": "the a an this that these those each every some any no all both",
    "auxiliary": "is was are were be been being am has have had do does did will would can could may might shall "
    "should must",
}
"""Closed classes of English words; names, not claims about grammar: a token is in a class wherever its text is."""


def token_classes(table: TokenTable, min_sequences: int) -> list[Feature]:
    """What kind of token it is: its characters, or a closed class of English words."""
    kinds = [Feature(f"class {name}", "query", f"any {name}", _by_text(test)) for name, test in CLASSES.items()]
    return kinds + [Feature(f"class {name}", "query", f"any {name}", _by_word(set(words.split())))
                    for name, words in WORDS.items()]  # fmt: skip


def previous_classes(table: TokenTable, min_sequences: int) -> list[Feature]:
    """What kind of token came before."""
    return [Feature(f"after class {feature.name.removeprefix('class ')}", "context", f"after {feature.words}",
                    _moved(feature.track), offset=1) for feature in token_classes(table, min_sequences)]  # fmt: skip


def _by_text(test: Callable[[str], bool]) -> Callable[[TokenTable], Track]:
    return lambda table: table.where(test)


def _by_word(words: set[str]) -> Callable[[TokenTable], Track]:
    return lambda table: table.where(lambda text: text.strip().lower() in words)


def _moved(track: Callable[[TokenTable], Track]) -> Callable[[TokenTable], Track]:
    return lambda table: table.back(track(table), 1)


# ---- context and frequency ------------------------------------------------------------------------------------------


def contexts(table: TokenTable, min_sequences: int) -> list[Feature]:
    """What the sequence held before this token."""
    return [
        Feature("token occurred before", "context", "a token that occurred before", occurred_before),
        Feature("new token", "context", "a token that is new here", lambda t: ~occurred_before(t) & t.real),
        Feature("inside brackets", "context", "inside brackets", inside_brackets),
        Feature("inside quotes", "context", "inside quotes", inside_quotes),
        Feature("line start", "context", "within 4 tokens of a newline", lambda t: since_newline(t) <= 4),
        Feature("far from newline", "context", "over 64 tokens from a newline", lambda t: since_newline(t) > 64),
    ]


def occurred_before(table: TokenTable) -> Track:
    """True where the same token stands earlier in the sequence."""
    track = np.zeros(table.codes.shape, dtype=bool)
    for row, codes in enumerate(table.codes):
        _, first = np.unique(codes, return_index=True)
        track[row] = True
        track[row, first] = False
    return track & table.real


def inside_brackets(table: TokenTable) -> Track:
    """True after an opening bracket until its closing one, the brackets themselves left out."""
    opening, closing = (table.where(_searches(p)) for p in (_OPENING, _CLOSING))
    depth = (opening.astype(int) - closing).cumsum(-1)
    # A closing bracket without an opening one must not make everything after it count as outside for ever.
    depth = depth - np.minimum.accumulate(np.minimum(depth, 0), -1)
    return (depth > 0) & ~opening & ~closing & table.real


def _searches(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda text: bool(pattern.search(text))


def inside_quotes(table: TokenTable) -> Track:
    """True after an odd number of double quotes, the quotes themselves left out."""
    marks = table.where(lambda text: text.count('"') % 2 == 1)
    curly = table.where(lambda text: "“" in text).astype(int) - table.where(lambda text: "”" in text)
    return ((marks.cumsum(-1) % 2 == 1) | (curly.cumsum(-1) > 0)) & ~marks & table.real


def since_newline(table: TokenTable) -> np.ndarray:
    """Tokens since the last newline, ``[sequence, position]``; a large number before the first one."""
    positions = np.arange(table.codes.shape[1])
    last = np.maximum.accumulate(np.where(table.where(CLASSES["newline"]), positions, -(10**6)), -1)
    distance = positions - last
    return np.where(distance == 0, 10**6, distance)


def frequencies(table: TokenTable, min_sequences: int) -> list[Feature]:
    """How common the token is in these prompts: the rarest and the commonest quarter of all occurrences."""
    return [
        Feature("rare token", "query", "a rare token", lambda t: _frequency_rank(t) <= 0.25),
        Feature("common token", "query", "a very common token", lambda t: (_frequency_rank(t) > 0.75) & t.real),
    ]


def _frequency_rank(table: TokenTable) -> np.ndarray:
    """Share of all occurrences that belong to tokens as rare or rarer; 2 at padding for the rare side."""
    counts = table.counts()
    order = np.argsort(counts, kind="stable")
    share = np.empty(len(counts) + 1)
    share[order] = counts[order].cumsum() / counts.sum()
    share[-1] = 2.0
    return share[table.codes]


Family: TypeAlias = "Callable[[TokenTable, int], list[Feature]]"
FAMILIES: dict[str, Family] = {
    "token": tokens_at(0, ""),
    "previous token": tokens_at(1, "after"),
    "two back": tokens_at(2, "two after"),
    "class": token_classes,
    "previous class": previous_classes,
    "context": contexts,
    "frequency": frequencies,
}
"""The default vocabulary, by family name."""


def vocabulary(table: TokenTable, chosen: Sequence[str | Feature], min_sequences: int) -> list[Feature]:
    """Collect features: families by name, and features of the caller's own.

    Raises:
        InputError: An unknown family, or two features of one name.
    """
    features: list[Feature] = []
    for item in chosen:
        if isinstance(item, Feature):
            features.append(item)
        elif item in FAMILIES:
            features += FAMILIES[item](table, min_sequences)
        else:
            raise InputError("unknown feature", expected=f"a Feature, or one of {', '.join(FAMILIES)}", got=repr(item))
    names = [feature.name for feature in features]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise InputError("features have names of their own", expected="each name once", got=", ".join(doubled[:4]))
    return features


def tracks(table: TokenTable, features: Sequence[Feature]) -> np.ndarray:
    """Where each feature holds, bool ``[feature, sequence, position]``.

    Raises:
        InputError: A feature's function gave something else than a boolean ``[sequence, position]``.
    """
    made = np.zeros((len(features), *table.codes.shape), dtype=bool)
    for row, feature in enumerate(features):
        track = np.asarray(feature.track(table))
        if track.shape != table.codes.shape or track.dtype != bool:
            raise InputError(f"feature {feature.name!r} gives a track", expected=f"bool {table.codes.shape}",
                             got=f"{track.dtype} {track.shape}")  # fmt: skip
        made[row] = track & table.real
    return made
