"""Two drafters in one tree."""

from __future__ import annotations

from paceline.drafters.mixed import MixedDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.testing import ReplayDrafter
from paceline.tree import DraftTree

GREEDY = SamplingParameters(max_new_tokens=24)


class Recorder:
    """Proposes one chain, and notes what it is told."""

    def __init__(self, ids: list[int], values: list[float], features: tuple[int, ...] = ()) -> None:
        self.required_features = features
        self.ids, self.values = ids, values
        self.told: list[str] = []

    def propose(self, sequences, max_nodes):
        return [
            DraftTree.from_chain(s.last_token_id, self.ids, self.values).take(max_nodes) for s in sequences
        ]

    def observe(self, output, results):
        self.told.append("observe")

    def release(self, sequence):
        self.told.append("release")


def test_the_most_valuable_nodes_of_both_are_drafted():
    mixed = MixedDrafter([Recorder([5, 6, 7], [0.9, 0.5, 0.1]), Recorder([5, 8], [0.5, 0.4])])
    sequence = Sequence([1, 2, 3], GREEDY, frozenset(), 64, seed=0)
    [tree] = mixed.propose([sequence], 3)
    assert sorted(tree.token_ids.tolist()) == [3, 5, 6, 8]
    [tree] = mixed.propose([sequence], 1)
    assert tree.token_ids.tolist() == [3, 5]


def test_every_part_is_told_everything():
    parts = [Recorder([5], [0.5], (1, 3)), Recorder([6], [0.5], (0, 1))]
    mixed = MixedDrafter(parts)
    assert mixed.required_features == (0, 1, 3)
    mixed.observe(None, [])
    mixed.release(None)
    assert [part.told for part in parts] == [["observe", "release"]] * 2


def test_lookup_learns_from_text_that_another_part_drafted(generator_of, oracle_of):
    """Its odds count what was emitted, whoever drafted it."""
    prompt = tuple([5, 6, 7, 8] * 6)
    recorded = {prompt: oracle_of("llama", prompt, 24)}
    lookup = PromptLookupDrafter()
    drafter = MixedDrafter([ReplayDrafter(recorded, 4), lookup])
    generator = generator_of("llama", drafter)
    answer = generator.open(list(prompt), GREEDY)
    generator.engine.round()
    generator.engine.round()
    state = lookup._states[answer.sequence]
    assert sum(odds.num_trials for odds in state.is_first_right.values()) >= 1
    generator.engine.release(answer.sequence)
