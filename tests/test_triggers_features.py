"""Features of tokens, on sentences short enough to check by eye."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sinklens as sl
from sinklens.triggers.features import (
    FAMILIES,
    Feature,
    TokenTable,
    inside_brackets,
    inside_quotes,
    occurred_before,
    since_newline,
    spoken,
    tracks,
    vocabulary,
)
from tests import tiny


def table(text: str) -> TokenTable:
    return TokenTable.of(sl.PromptSet.from_texts([text], tiny.tokenizer(), bos="never"))


def places(track: np.ndarray) -> list[int]:
    return np.flatnonzero(track[0]).tolist()


def test_context_features_by_hand() -> None:
    assert places(inside_brackets(table("a)b(cd(e))f"))) == [4, 5, 7]
    assert places(inside_quotes(table('a"bc"d'))) == [2, 3]
    assert places(occurred_before(table("abcab"))) == [3, 4]
    assert since_newline(table("a\nbc"))[0, 2:].tolist() == [1, 2]
    one = table("a.bc")
    assert places(one.back(one.where(lambda text: text == "."), 2)) == [3]


def test_classes_by_hand() -> None:
    made = {f.name: places(f.track(table("aB. 7\n!"))) for f in FAMILIES["class"](table("ab"), 1)}
    assert made["class punctuation"] == [2, 6]
    assert made["class digit"] == [4]
    assert made["class newline"] == [5]
    assert made["class capitalized"] == [1]
    assert made["class sentence end"] == [2, 6]


def test_token_features_keep_their_identity_in_other_prompts() -> None:
    first = TokenTable.of(sl.PromptSet.from_texts(["abca", "bca"], tiny.tokenizer(), bos="never"))
    features = {f.name: f for f in vocabulary(first, ["token", "previous token"], 2)}
    other = table("zac")
    assert places(features["token 'c'"].track(other)) == [2]
    assert places(features["after 'a'"].track(other)) == [2]
    assert not features["token 'b'"].track(other).any()
    assert features["after 'a'"].side == "context"
    assert "after 'a'" not in {f.name for f in vocabulary(first, ["token"], 2)}


def test_padding_on_either_side_belongs_to_nothing() -> None:
    tokens = torch.tensor([[0, 0, 5, 6, 5], [5, 6, 5, 0, 0]])
    made = TokenTable.of(sl.PromptSet.from_tokens(tokens, tokens > 0))
    track = tracks(made, vocabulary(made, list(FAMILIES), 1))
    assert not track[:, ~made.real].any()
    np.testing.assert_array_equal(track[:, 0, 2:], track[:, 1, :3])


def test_labels_take_the_place_of_ids() -> None:
    prompts = sl.PromptSet.from_inputs(torch.zeros(2, 3, 4), [["BOS", "content", "trigger"]] * 2)
    (feature,) = [f for f in vocabulary(TokenTable.of(prompts), ["token"], 2) if "trigger" in f.name]
    assert feature.name == "token 'trigger'"
    assert feature.token is None
    assert places(feature.track(TokenTable.of(prompts))) == [2]


def test_words_of_tokens() -> None:
    assert [spoken(t) for t in ("\n", "\n\n", " and", "\t")] == ["newline", "2 newlines", "' and'", "'\\t'"]


def test_unknown_doubled_and_misshapen_features() -> None:
    a = table("abc")
    with pytest.raises(sl.InputError, match=r"unknown feature: expected a Feature, or one of token, .*, got 'colour'"):
        vocabulary(a, ["colour"], 1)
    mine = Feature("mine", "query", "mine", lambda t: np.zeros(3, dtype=bool))
    with pytest.raises(sl.InputError, match="features have names of their own: expected each name once, got mine"):
        vocabulary(a, [mine, mine], 1)
    with pytest.raises(sl.InputError, match=r"feature 'mine' gives a track: expected bool \(1, 3\), got bool \(3,\)"):
        tracks(a, [mine])
