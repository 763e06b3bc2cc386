"""Drafter none makes every round one plain step."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.drafters.none import NoDrafter
from paceline.errors import ConfigError
from paceline.registry import drafter_class
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence


def test_proposes_the_root_alone_for_every_sequence(target_of):
    drafter = drafter_class("none").build(target_of(), None, 32)
    sequences = [Sequence(ids, SamplingParameters(), frozenset(), 100, 0) for ids in ([3], [4, 5])]
    trees = drafter.propose(sequences, 32)
    assert [(tree.num_draft_tokens, int(tree.token_ids[0])) for tree in trees] == [(0, 3), (0, 5)]
    assert drafter.required_features == ()


def test_head_is_refused(target_of):
    with pytest.raises(ConfigError, match="drafter 'none' has no trained head, but head 'heads/x' was given"):
        NoDrafter.build(target_of(), Path("heads/x"), 32)
