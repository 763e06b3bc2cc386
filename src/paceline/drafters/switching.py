"""One drafter a request: several are loaded, and every sequence is drafted for by the one it asked for.

A server's requests choose among them, the off switch `none` included. All sequences still share one forward
of the target; each drafter sees the part of it that belongs to its own sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from paceline.config import nearest_name
from paceline.drafters.base import DraftProposer
from paceline.errors import ConfigError, RequestError
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetOutput
from paceline.tree import DraftTree


class SwitchingDrafter:
    """Asks for every sequence the drafter that was assigned to it.

    Args:
        parts: name -> drafter.
        default: name of the one for sequences that nothing was assigned to.
    """

    def __init__(self, parts: Mapping[str, DraftProposer], default: str) -> None:
        if default not in parts:
            raise ConfigError(f"default drafter {default!r} is not one of {', '.join(sorted(parts))}")
        self._parts = dict(parts)
        self.default = default
        self._names: dict[Sequence, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of all drafters, the default one first."""
        return (self.default, *sorted(name for name in self._parts if name != self.default))

    @property
    def required_features(self) -> tuple[int, ...]:
        """Layers that the drafters in use read."""
        used = {self.default, *self._names.values()}
        return tuple(sorted({layer for name in used for layer in self._parts[name].required_features}))

    def check(self, name: str) -> None:
        """Raise RequestError unless a drafter of that name is loaded."""
        if name not in self._parts:
            raise RequestError(
                f"drafter {name!r} is not loaded: did you mean {nearest_name(name, self.names)!r}? Loaded: "
                f"{', '.join(self.names)}"
            )

    def assign(self, sequence: Sequence, name: str) -> None:
        """Choose the drafter of a new sequence; RequestError where it is not loaded."""
        self.check(name)
        if name != self.default:
            self._names[sequence] = name

    def part_of(self, sequence: Sequence) -> DraftProposer:
        """The drafter of a sequence."""
        return self._parts[self._names.get(sequence, self.default)]

    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:
        """One tree per sequence, from its own drafter."""
        trees: dict[int, DraftTree] = {}
        for name, places in self._groups(sequences).items():
            found = self._parts[name].propose([sequences[i] for i in places], max_nodes)
            trees.update(zip(places, found, strict=True))
        return [trees[i] for i in range(len(sequences))]

    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Show every drafter the rows of its own sequences."""
        for name, places in self._groups([segment.sequence for segment in output.segments]).items():
            self._parts[name].observe(output.part(places), [results[i] for i in places])

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._parts[self._names.pop(sequence, self.default)].release(sequence)

    def _groups(self, sequences: Seq[Sequence]) -> dict[str, list[int]]:
        """Places of the sequences by the name of their drafter."""
        groups: dict[str, list[int]] = {}
        for place, sequence in enumerate(sequences):
            groups.setdefault(self._names.get(sequence, self.default), []).append(place)
        return groups
