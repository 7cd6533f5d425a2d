"""Trigger sets: the smallest that explains, chosen on one half."""

from __future__ import annotations

import numpy as np

from sinklens.triggers.selection import choose_sets, random_token_sets, shifted_states, union_of


def made(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Head 0 wakes at tokens 3 and 4, head 1 at token 5, head 2 at random."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 12, size=(20, 64))
    state = np.stack([np.isin(codes, [3, 4]), codes == 5, rng.random(codes.shape) < 0.1])
    return codes, state, np.ones(codes.shape, dtype=bool)


def test_sets_are_complete_small_and_not_redundant() -> None:
    codes, state, counted = made()
    tokens = np.stack([codes == k for k in range(12)])
    after = np.roll(tokens, 1, axis=-1)
    both = np.concatenate([after, tokens, tokens[3:4] | tokens[9:10]])
    chosen = choose_sets(state, both, counted, np.ones((3, len(both)), dtype=bool))
    assert set(chosen.members[0]) == {12 + 3, 12 + 4}
    assert chosen.members[1] == (12 + 5,)
    assert (chosen.union[:2] == state[:2]).all()
    np.testing.assert_array_equal(union_of(chosen.members, both, counted), chosen.union)


def test_a_class_is_taken_before_its_members() -> None:
    codes, state, counted = made()
    tracks = np.stack([*(codes == k for k in range(12)), np.isin(codes, [3, 4])])
    chosen = choose_sets(state, tracks, counted, np.ones((3, 13), dtype=bool))
    assert chosen.members[0] == (12,)


def test_only_allowed_features_join() -> None:
    codes, state, counted = made()
    tracks = np.stack([codes == k for k in range(12)])
    allowed = np.zeros((3, 12), dtype=bool)
    allowed[0, 3] = True
    assert choose_sets(state, tracks, counted, allowed).members == ((3,), (), ())


def test_a_gain_that_one_sequence_carries_does_not_join() -> None:
    codes, state, counted = made()
    lone = np.zeros(codes.shape, dtype=bool)
    lone[0, :60] = True
    odd = state.copy()
    odd[0, 0, :60] = True
    chosen = choose_sets(odd, np.stack([codes == 3, lone]), counted, np.ones((3, 2), dtype=bool))
    assert chosen.members[0] == (0,)


def test_baselines_keep_what_they_should() -> None:
    codes, state, counted = made()
    counted[:, :8] = False
    rng = np.random.default_rng(1)
    moved = shifted_states(state, counted, 8, rng)
    np.testing.assert_array_equal(moved.sum(-1), (state & counted).sum(-1))
    assert (moved != (state & counted)).any()
    drawn = random_token_sets(state & counted, codes, counted, rng)
    assert 0.3 < drawn[0].sum() / (state & counted)[0].sum() <= 1
