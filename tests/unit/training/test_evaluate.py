from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.training.evaluate import count_rounds, evaluate_head, evaluate_trees
from paceline.training.samples import Samples
from paceline.tree import DraftTree
from paceline.vocabularies.trie import TokenTrie

WIDTHS = (1, 2, 3, 5, 8)


def random_case(seed: int) -> tuple[TokenTrie, Samples, Tensor, list[list[int]]]:
    """A trie, two answers over the same few tokens, and random scores."""
    generator = torch.Generator().manual_seed(seed)
    entries = {
        tuple(torch.randint(0, 3, (int(length),), generator=generator).tolist())
        for length in torch.randint(1, 5, (12,), generator=generator)
    }
    trie = TokenTrie(sorted(entries))
    texts = [torch.randint(0, 4, (length,), generator=generator).tolist() for length in (9, 6)]
    matches = [trie.match(text) for text in texts]
    num_rows = sum(map(len, texts))
    samples = Samples(
        shards=(torch.zeros(num_rows, 1, 2),),
        shard_ids=torch.zeros(num_rows, dtype=torch.int64),
        shard_rows=torch.arange(num_rows),
        newest_ids=torch.zeros(num_rows, dtype=torch.int64),
        output_ids=torch.tensor([token for text in texts for token in text]),
        entries=torch.cat([match.entries for match in matches]),
        nodes=torch.cat([match.nodes for match in matches]),
        followers=torch.full((num_rows,), -1),
        is_censored=torch.zeros(num_rows, dtype=torch.bool),
        answer_lens=tuple(map(len, texts)),
        num_empty=0,
    )
    return trie, samples, torch.randn(num_rows, len(entries), generator=generator) * 2, texts


def simulated_rounds(trie: TokenTrie, scores: Tensor, texts: list[list[int]], width: int) -> int:
    """Rounds that a drafter with these scores needs, with real draft trees."""
    num_rounds, start = 0, 0
    for text in texts:
        position = 1
        num_rounds += 1
        while position < len(text):
            row = scores[start + position][None].softmax(-1)
            best = trie.most_valuable(row, width)[0]
            tree = DraftTree.from_trie_mass(0, trie.token_ids, trie.parents, best.values, best.nodes)
            node = 0
            accepted = 0
            while position + accepted < len(text):
                token = text[position + accepted]
                child = [
                    i
                    for i in range(1, len(tree))
                    if int(tree.parents[i]) == node and int(tree.token_ids[i]) == token
                ]
                if not child:
                    break
                node, accepted = child[0], accepted + 1
            position += accepted + 1
            num_rounds += 1
        start += len(text)
    return num_rounds


@pytest.mark.parametrize("seed", range(8))
def test_counts_the_rounds_that_real_draft_trees_need(seed: int) -> None:
    trie, samples, scores, texts = random_case(seed)
    found = evaluate_head(lambda rows: scores[rows], samples, trie, WIDTHS)
    for width in WIDTHS:
        assert found.num_rounds[width] == simulated_rounds(trie, scores, texts, width)
        assert found.tokens_per_round[width] == pytest.approx(len(samples) / found.num_rounds[width])


@pytest.mark.parametrize("seed", range(8))
def test_draft_trees_themselves_give_the_same_figures(seed: int) -> None:
    """Heads with a step are evaluated by their trees; for one without it both ways must agree."""
    trie, samples, scores, _ = random_case(seed)

    def trees_of(rows: Tensor, width: int) -> list[DraftTree]:
        return [
            DraftTree.from_trie_mass(0, trie.token_ids, trie.parents, best.values, best.nodes)
            for best in trie.most_valuable(scores[rows].softmax(-1), width)
        ]

    expected = evaluate_head(lambda rows: scores[rows], samples, trie, WIDTHS)
    found = evaluate_trees(trees_of, samples, WIDTHS)
    assert found.num_rounds == expected.num_rounds
    assert found.tokens_per_round == expected.tokens_per_round
    for width in WIDTHS:
        assert found.expected_per_round[width] == pytest.approx(expected.expected_per_round[width], abs=1e-5)
    assert [part.num_nodes for part in found.calibration] == [p.num_nodes for p in expected.calibration]
    assert [part.accepted_fraction for part in found.calibration] == [
        pytest.approx(part.accepted_fraction) for part in expected.calibration
    ]
    assert evaluate_trees(trees_of, samples, (3,), max_rows=2).num_tokens == 9


def test_expected_tokens_are_the_values_of_the_drafted_nodes() -> None:
    trie, samples, scores, _ = random_case(3)
    found = evaluate_head(lambda rows: scores[rows], samples, trie, WIDTHS)
    for width in WIDTHS:
        best = trie.most_valuable(scores.softmax(-1), width)
        mean = sum(float(nodes.values.sum()) for nodes in best) / len(best)
        assert found.expected_per_round[width] == pytest.approx(1 + mean, abs=1e-6)


def test_certain_head_drafts_the_whole_entry() -> None:
    trie = TokenTrie([(1, 2, 3), (4,)])
    text = [9, 1, 2, 3, 9, 1, 2, 3, 9]
    match = trie.match(text)
    samples = Samples(
        (torch.zeros(9, 1, 2),), torch.zeros(9).long(), torch.arange(9), torch.zeros(9).long(),
        torch.tensor(text), match.entries, match.nodes, torch.full((9,), -1),
        torch.zeros(9, dtype=torch.bool), (9,), 0,
    )  # fmt: skip
    scores = torch.tensor([[20.0, -20.0]]).expand(9, 2)
    found = evaluate_head(lambda rows: scores[rows], samples, trie, (1, 3))
    # Three nodes: one round with the prompt, then [1 2 3 9] twice. One node: [1 2] [3] [9] twice.
    assert found.num_rounds == {1: 7, 3: 3}
    assert found.tokens_per_round[3] == 3.0


def test_calibration_counts_every_drafted_node() -> None:
    trie, samples, scores, _ = random_case(1)
    found = evaluate_head(lambda rows: scores[rows], samples, trie, (3,))
    assert sum(part.num_nodes for part in found.calibration) == 3 * len(samples)
    assert all(0 <= part.accepted_fraction <= 1 for part in found.calibration)


def test_row_limit_ends_with_a_whole_answer() -> None:
    trie, samples, scores, _ = random_case(2)
    assert evaluate_head(lambda rows: scores[rows], samples, trie, (3,), max_rows=2).num_tokens == 9
    assert evaluate_head(lambda rows: scores[rows], samples, trie, (3,), max_rows=10).num_tokens == 15


@pytest.mark.parametrize(
    ("depths", "expected"), [([0], 1), ([0, 0, 0], 3), ([5, 2, 9, 9], 2), ([0, 0, 1, 7, 0], 4)]
)
def test_first_round_yields_one_token_and_later_ones_jump(depths: list[int], expected: int) -> None:
    assert count_rounds(depths) == expected
