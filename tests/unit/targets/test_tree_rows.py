"""What the device computes from parents, against what the host builds for the eager path."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_stand_ins import CaptureRules
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets import attention
from paceline.targets.buckets import Bucket
from paceline.targets.staged_rows import stage
from paceline.targets.tree_rows import TreeRows, reach
from paceline.tree import DraftTree

TAIL = 1000


@st.composite
def trees(draw, most=40):
    parents = [-1]
    for node in range(1, draw(st.integers(1, most))):
        is_chain = draw(st.booleans())
        parents.append(node - 1 if is_chain else draw(st.integers(0, node - 1)))
    return DraftTree(torch.arange(len(parents)) + 1, torch.tensor(parents), torch.ones(len(parents)))


def segments_of(forest):
    return [
        Segment(Sequence([1], SamplingParameters(), frozenset(), 4096, seed=0), (), tree) for tree in forest
    ]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), window=st.sampled_from([None, 2, 5, 9]))
def test_positions_places_and_masks_are_those_of_the_host(data, window):
    forest = data.draw(st.lists(trees(), min_size=1, max_size=4))
    starts = data.draw(st.lists(st.integers(0, 30), min_size=len(forest), max_size=len(forest)))
    slots = data.draw(st.permutations(range(6)))[: len(forest)]
    segments = segments_of(forest)
    bucket = Bucket.of(segments, slots, starts)
    staged = stage(segments, slots, starts, bucket)
    with CaptureRules():
        rows = TreeRows(staged, TAIL)
        visible = rows.visibility(bucket.view_len, window)
    assert visible.shape == (bucket.batch_size, bucket.width, bucket.view_len)
    expected = attention.visibility(segments, starts, bucket.width, bucket.view_len, window)
    is_row = torch.zeros(bucket.batch_size, bucket.width, dtype=torch.bool)
    for i, (segment, slot, start) in enumerate(zip(segments, slots, starts, strict=True)):
        length = len(segment)
        is_row[slot, :length] = True
        assert torch.equal(visible[slot, :length], expected[i, :length])
        assert torch.equal(rows.positions[slot, :length], attention.segment_positions(segment, start))
        assert torch.equal(rows.writes[slot, :length], torch.arange(start, start + length))
        assert torch.equal(staged.token_ids[slot, :length], segment.tree.token_ids)
    # Padding writes where no text is, sees something, and stands at a position that its sequence has.
    assert bool((rows.writes[~is_row] >= TAIL).all())
    assert bool(visible.any(dim=2).all())
    of_slot = torch.zeros(bucket.batch_size, dtype=torch.int64)
    of_slot[slots] = torch.tensor(starts)
    assert torch.equal(rows.positions[~is_row], of_slot[:, None].expand_as(is_row)[~is_row])
    flat = torch.arange(is_row.numel()).view_as(is_row)
    order = [
        flat[slot, node]
        for segment, slot in zip(segments, slots, strict=True)
        for node in range(len(segment))
    ]
    assert staged.order[: len(order)].tolist() == order


@settings(deadline=None, max_examples=40)
@given(trees(most=70))
def test_reach_is_every_node_above(tree):
    assert torch.equal(reach(tree.parents[None])[0], tree.ancestors)


def test_a_chain_as_long_as_the_bucket_is_wide_is_seen_whole():
    for width in (1, 2, 3, 5, 16, 65, 129):
        parents = torch.arange(-1, width - 1)
        assert torch.equal(reach(parents[None])[0], torch.ones(width, width).tril().bool())
