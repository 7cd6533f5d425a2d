"""Prompt sets: what is recorded, what is refused, and where they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sinklens as sl
from tests import tiny

TEXTS = ["the cat sat on the mat", "a dog", "no, really: 12 dogs and 3 cats"]


def test_texts_get_one_bos_and_padding() -> None:
    made = sl.PromptSet.from_texts(TEXTS, tiny.tokenizer(), length=20)
    assert made.tokens.shape == (3, 20)
    assert made.tokens[:, 0].tolist() == [1, 1, 1]
    assert made.mask.sum(-1).tolist() == [20, 6, 20]
    facts = made.facts()
    assert (facts["bos"], facts["padding"], facts["truncated"], facts["first_token"]) == ("one", "right", 2, "<s>")


def test_bos_policies() -> None:
    tokenizer = tiny.tokenizer()
    assert sl.PromptSet.from_texts(TEXTS, tokenizer, bos="never").bos == "none"
    with pytest.warns(UserWarning, match=r"two BOS tokens at positions 0 and 1 of sequences \[0\]"):
        assert sl.PromptSet.from_texts(["<s><s>templated text"], tokenizer).bos == "two"
    tokenizer.bos_token = None
    assert sl.PromptSet.from_texts(TEXTS, tokenizer).bos == "none"
    with pytest.raises(sl.InputError, match="the tokenizer has no BOS token: expected bos='auto' or 'never'"):
        sl.PromptSet.from_texts(TEXTS, tokenizer, bos="always")


def test_fingerprints_follow_the_content_only() -> None:
    tokens, mask = tiny.tokens(2, 10), torch.ones(2, 10, dtype=torch.bool)
    mask[1, 7:] = False
    other = tokens.clone()
    other[1, 8] = 5
    first, second = (sl.PromptSet.from_tokens(t, mask) for t in (tokens, other))
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != sl.PromptSet.from_tokens(tokens).fingerprint
    tokens[0, 0] = 63  # the set keeps its own copy
    assert first.fingerprint == second.fingerprint


def test_builtin_takes_turns_and_filters() -> None:
    made = sl.PromptSet.builtin(tiny.tokenizer(), length=64)
    assert len(made) >= 64
    assert len(set(made.names)) == len(made)
    few = sl.PromptSet.builtin(tiny.tokenizer(), length=64, limit=13)
    assert len(set(few.domains)) == 13
    assert set(sl.PromptSet.builtin(tiny.tokenizer(), domains=["code"]).domains) == {"code"}
    with pytest.raises(sl.InputError, match="unknown domain: expected code, dialogue"):
        sl.PromptSet.builtin(tiny.tokenizer(), domains=["poetry"])


def test_builtin_passages_have_their_promised_size() -> None:
    from sinklens.prompts import _passages

    records = _passages()
    assert len(records) >= 64
    assert all(400 <= len(record["text"]) <= 2600 for record in records)
    prose = [r for r in records if r["language"] == "en" and r["domain"] not in ("code", "list", "numbers")]
    assert all(150 <= len(record["text"].split()) <= 300 for record in prose)
    assert len({r["language"] for r in records}) >= 6


def test_files_are_cut_into_full_sequences(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc " * 100, encoding="utf-8")
    made = sl.PromptSet.from_file(path, tiny.tokenizer(), length=32)
    assert made.tokens.shape == (12, 32)
    assert made.tokens[:, 0].tolist() == [1] * 12
    assert sl.PromptSet.from_file(path, tiny.tokenizer(), length=32, limit=2).tokens.shape == (2, 32)


def test_datasets_are_streamed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "' + "abc " * 50 + '"}\n{"body": "' + "xyz " * 50 + '"}\n', encoding="utf-8")
    made = sl.PromptSet.from_dataset("json", tiny.tokenizer(), column="body", length=40, limit=3, data_files=str(path))
    assert made.tokens.shape == (3, 40)
    with pytest.raises(sl.InputError, match="the dataset lacks the text column: expected text, got"):
        sl.PromptSet.from_dataset("json", tiny.tokenizer(), length=40, data_files=str(path))


def test_random_and_repeated() -> None:
    random = sl.PromptSet.random(64, count=3, length=10, bos=1)
    again = sl.PromptSet.random(64, count=3, length=10, bos=1)
    assert torch.equal(random.tokens, again.tokens)
    assert random.tokens[:, 0].tolist() == [1, 1, 1]
    assert all(len(set(row)) == 1 for row in sl.PromptSet.repeated(64, count=3, length=10).tokens.tolist())


def test_select_and_batches() -> None:
    made = sl.PromptSet.from_texts(TEXTS, tiny.tokenizer(), length=12)
    part = made.select([2, 0])
    assert part.names == (made.names[2], made.names[0])
    batches = list(made.batches(2))
    assert [rows for rows, _, _ in batches] == [slice(0, 2), slice(2, 3)]
    assert batches[0][2] is not None
    assert batches[1][2] is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "a text file holds text: expected at least one word, got .* is empty"),
        (b"\xff\xfe\xfa bad", "a text file is UTF-8: expected UTF-8"),
        (b"short", "the text fills no sequence: expected at least 256 tokens"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(sl.InputError, match=text):
        sl.PromptSet.from_file(path, tiny.tokenizer())


def test_bad_sets() -> None:
    for make, text in [
        (lambda: sl.PromptSet.from_texts([], tiny.tokenizer()), "there is nothing to tokenize"),
        (
            lambda: sl.PromptSet.from_texts(["a"], tiny.tokenizer(), bos="never"),
            "a prompt needs a token and something before it: expected at least 2 tokens, got 1",
        ),
        (lambda: sl.PromptSet.from_texts(["abc"], tiny.tokenizer(), length=1), "a sequence holds at least two tokens"),
        (lambda: sl.PromptSet.from_tokens(torch.zeros(3)), "token ids form a table"),
        (lambda: sl.PromptSet.from_file("/nowhere/text.txt", tiny.tokenizer()), "the text file cannot be read"),
    ]:
        with pytest.raises(sl.InputError, match=text):
            make()
