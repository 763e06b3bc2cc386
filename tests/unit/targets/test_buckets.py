"""Shapes of static forwards: large enough, few, and those whose cost is measured."""

from __future__ import annotations

from paceline.engine import forward_cost
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets.buckets import WIDTHS, Bucket, next_power_of_two, rounded_view_len
from paceline.tree import DraftTree


def test_views_hold_the_text_and_waste_at_most_a_quarter():
    lengths = range(1, 40_000)
    rounded = [rounded_view_len(length) for length in lengths]
    assert rounded == sorted(rounded)
    assert all(length <= view for length, view in zip(lengths, rounded, strict=True))
    assert all(view <= 1.25 * length for length, view in zip(lengths, rounded, strict=True) if length > 1024)
    assert all(view % 256 == 0 for view in rounded)
    assert len(set(rounded)) < 28


def test_powers_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]


def test_a_bucket_holds_every_slot_and_every_tree():
    sequences = [Sequence([5] * n, SamplingParameters(), frozenset(), 4096, seed=0) for n in (3, 300)]
    trees = [DraftTree.from_chain(7, [1] * 5), DraftTree.root_only(7)]
    segments = [Segment(s, (), tree) for s, tree in zip(sequences, trees, strict=True)]
    assert Bucket.of(segments, [4, 0], [2, 299]) == Bucket(8, 8, 512)
    assert Bucket.of(segments[:1], [0], [250]) == Bucket(1, 8, 256)
    assert Bucket.of(segments[:1], [0], [251]) == Bucket(1, 8, 512)


def test_buckets_are_among_the_widths_that_are_measured():
    assert set(WIDTHS) <= set(forward_cost.WIDTHS)
    assert WIDTHS[-1] == forward_cost.WIDTHS[-1]
