"""Random numbers that belong to a place in a text, not to a stream.

The number for (seed, position) is entry `position` of the SplitMix64 sequence (Steele, Lea and Flood, 2014)
that starts at the hashed seed. It can be computed for any position on its own, so a rejected draft never
shifts the numbers behind it, and no global generator is touched.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_NUM_BITS = 50


def keyed_uniforms(seed: int, position: int, count: int) -> list[float]:
    """Uniform numbers for `count` positions from `position` on.

    Args:
        seed: any integer.
        position: absolute position in the text, prompt included.
        count: how many positions.

    Returns:
        Numbers strictly between 0 and 1: centres of 2^50 equal cells, so that times a total in float64 they
        stay strictly below it.
    """
    start = _mixed(_mixed(seed & _MASK) ^ _GOLDEN_GAMMA)
    numbers = (_mixed(start + index * _GOLDEN_GAMMA & _MASK) for index in range(position, position + count))
    return [((number >> (64 - _NUM_BITS)) + 0.5) / (1 << _NUM_BITS) for number in numbers]


def _mixed(number: int) -> int:
    """Output function of SplitMix64: a bijection on 64 bits that scatters neighbours."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)
