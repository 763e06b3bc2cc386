"""Keyed numbers are uniform, independent between places and seeds, and leave every generator alone."""

from __future__ import annotations

import random
from itertools import pairwise

import torch

from paceline.verifiers.keyed_random import keyed_uniforms


def chi_square(numbers, num_cells) -> float:
    """Distance from the uniform law over equal cells."""
    counts = [0] * num_cells
    for number in numbers:
        counts[int(number * num_cells)] += 1
    expected = len(numbers) / num_cells
    return sum((count - expected) ** 2 for count in counts) / expected


def test_number_belongs_to_its_position():
    assert keyed_uniforms(42, 10, 5)[2:] == keyed_uniforms(42, 12, 3)
    assert keyed_uniforms(42, 10, 0) == []


def test_numbers_are_strictly_inside_the_unit_interval():
    numbers = keyed_uniforms(3, 0, 2000)
    assert min(numbers) > 0
    assert max(numbers) < 1
    assert len(set(numbers)) == 2000


def test_numbers_are_uniform_along_positions_and_along_seeds():
    # 37.7 is the 99.9th percentile with 15 degrees of freedom.
    assert chi_square(keyed_uniforms(7, 0, 20000), 16) < 37.7
    assert chi_square([keyed_uniforms(seed, 5, 1)[0] for seed in range(20000)], 16) < 37.7


def test_neighbouring_positions_and_seeds_are_unrelated():
    along = keyed_uniforms(7, 0, 20001)
    pairs = [(int(a * 4) * 4 + int(b * 4)) / 16 for a, b in pairwise(along)]
    assert chi_square(pairs[::2], 16) < 37.7
    columns = [
        (keyed_uniforms(seed, 9, 1)[0], keyed_uniforms(seed + 1, 9, 1)[0]) for seed in range(0, 20000, 2)
    ]
    assert chi_square([(int(a * 4) * 4 + int(b * 4)) / 16 for a, b in columns], 16) < 37.7


def test_next_seed_is_not_the_same_stream_shifted():
    numbers = {number for seed in range(50) for number in keyed_uniforms(seed, 0, 50)}
    assert len(numbers) == 2500


def test_any_integer_is_a_seed():
    seeds = [0, -1, 1, 2**63 - 1, 2**63, -(2**70)]
    assert len({keyed_uniforms(seed, 0, 1)[0] for seed in seeds[:-1]}) == 5
    assert 0 < keyed_uniforms(seeds[-1], 0, 1)[0] < 1


def test_global_generators_are_untouched():
    before, torch_before = random.getstate(), torch.random.get_rng_state()
    keyed_uniforms(1, 2, 3)
    assert random.getstate() == before
    assert torch.equal(torch.random.get_rng_state(), torch_before)
