"""Tokens per round of several heads on the same recorded answers, without running the target on them.

    python examples/compare_heads.py heads/a heads/b --answers heads/a.work/answers-3c8c3ac6

The answers are those that `paceline train phrase` kept in its run folder; compared is on the conversations
that a run with the same `--held-out` fraction, or a higher one, leaves out of its training. `--choice
best-entry` builds the tree otherwise: the likeliest phrases one after another until the nodes are used up, as
drafters do that take the N best candidates, instead of adding up the chances of all phrases beneath a node.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import paceline
from paceline.drafters.phrase_trees import PhraseTrees
from paceline.heads.checkpoint import LoadedHead, load_head
from paceline.training.evaluate import WIDTHS, HeadEvaluation, evaluate_trees
from paceline.training.phrase_stages import scaled_embeddings
from paceline.training.prompts import is_held_out
from paceline.training.samples import Samples, read_samples
from paceline.tree import DraftTree


def trees_of_best_entries(
    loaded: LoadedHead, probabilities: torch.Tensor, roots: Sequence[int], max_nodes: int
) -> list[DraftTree]:
    """The likeliest phrases merged into one tree; a node is worth its likeliest phrase."""
    trees = []
    best = probabilities.topk(max_nodes, dim=1)
    rows = zip(roots, best.indices.tolist(), best.values.tolist(), strict=True)
    for root, entries, chances in rows:
        nodes: dict[tuple[int, int], int] = {}
        token_ids, parents, values = [root], [-1], [1.0]
        for entry, chance in zip(entries, chances, strict=True):
            node = 0
            for token_id in loaded.vocabulary.token_ids[entry]:
                key = (node, token_id)
                if key not in nodes:
                    nodes[key] = len(token_ids)
                    token_ids.append(token_id)
                    parents.append(node)
                    values.append(chance)
                node = nodes[key]
        tree = DraftTree(torch.tensor(token_ids), torch.tensor(parents), torch.tensor(values))
        trees.append(tree.take(max_nodes))
    return trees


@torch.no_grad()
def evaluate(
    loaded: LoadedHead, embedding: torch.Tensor, samples: Samples, choice: str, num_rows: int | None
) -> HeadEvaluation:
    """Draft at every row of the answers."""
    head, vocabulary = loaded.head, loaded.vocabulary
    num_recorded = samples.shards[0].shape[1] - 1
    if num_recorded != len(head.config.feature_layers) and head.config.feature_layers:
        raise SystemExit(
            f"the answers hold {num_recorded} layers, the head reads {list(head.config.feature_layers)}: "
            "give the answers that it was trained on"
        )
    trees = PhraseTrees(head, vocabulary.trie, vocabulary.token_ids, lambda ids: embedding[ids])

    def trees_of(rows: torch.Tensor, width: int) -> list[DraftTree]:
        states = samples.states(rows)
        newest = samples.newest_ids[rows]
        layers = {layer: states[:, 1 + i] for i, layer in enumerate(head.config.feature_layers)}
        inputs = head.join_inputs(states[:, 0], embedding[newest].to(states.dtype), layers)
        if choice == "mass":
            return trees.draft(inputs, newest.tolist(), width)
        probabilities = torch.softmax(head(inputs).float(), dim=-1)
        return trees_of_best_entries(loaded, probabilities, newest.tolist(), width)

    return evaluate_trees(trees_of, samples, max_rows=num_rows)


def main() -> None:
    """Print one line per head and way of choosing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("heads", type=Path, nargs="+", help="Head folders.")
    parser.add_argument("--answers", type=Path, required=True, help="answers-* folder of a training run.")
    parser.add_argument("--held-out", type=float, default=0.02, help="Fraction that is compared on.")
    parser.add_argument("--rows", type=int, default=None, help="Tokens, about; all of them by default.")
    parser.add_argument("--choice", choices=("mass", "best-entry"), nargs="+", default=["mass"])
    parser.add_argument("--target", default="smollm2")
    arguments = parser.parse_args()
    target = paceline.load(arguments.target, drafter="none", execution="eager", dtype="bf16").target
    embedding = scaled_embeddings(target)
    print("head, choice, tokens:", *WIDTHS, sep="\t")
    for folder in arguments.heads:
        loaded = load_head(folder)
        samples = read_samples(
            arguments.answers,
            loaded.vocabulary,
            lambda answer: is_held_out(answer.root_key, arguments.held_out),
        )
        for choice in arguments.choice:
            figures = evaluate(loaded, embedding, samples, choice, arguments.rows)
            per_round = "\t".join(f"{figures.tokens_per_round[width]:.3f}" for width in WIDTHS)
            print(f"{folder.name}, {choice}, {figures.num_tokens}:\t{per_round}", flush=True)


if __name__ == "__main__":
    main()
