"""Draft trees of a phrase head in torch: what other devices run; the compiled kernels are held against it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.heads.phrase import PhraseHead
from paceline.tree import DraftTree
from paceline.vocabularies.chains import PhraseChains, SecondPhrases
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import DEFAULT_NUM_CANDIDATES, SpeculativeVocabulary
from paceline.vocabularies.trie import TokenTrie


class PhraseTrees:
    """Turns the vectors of a position into a draft tree.

    Args:
        head: frozen.
        trie: of its vocabulary.
        token_ids: tokens of each phrase.
        embed: token ids [...] -> input embeddings [..., D] on the head's device.
        num_candidates: phrases that a head with a ranking scores.
    """

    def __init__(
        self,
        head: PhraseHead,
        trie: TokenTrie,
        token_ids: Seq[tuple[int, ...]],
        embed: Callable[[Tensor], Tensor],
        num_candidates: int = DEFAULT_NUM_CANDIDATES,
    ) -> None:
        self._head = head
        self._trie = trie
        self._embed = embed
        self._vocabulary = speculated_phrases(head, num_candidates)
        self._chains: PhraseChains | None = None
        if head.step is not None:
            self._chains = PhraseChains(trie, token_ids, head.config.chain_entries)

    @torch.no_grad()
    def draft(
        self, inputs: Tensor, roots: Seq[int], max_nodes: int, *, has_chains: bool = True
    ) -> list[DraftTree]:
        """The most valuable phrase nodes of every row.

        Args:
            inputs: [M, num_inputs * D], what the head reads.
            roots: newest token of each row.
            max_nodes: most drafted nodes per row, at least 1.
            has_chains: whether a head with a step drafts second phrases.
        """
        state = self._head.trunk(inputs)
        probabilities = self._probabilities(state)
        if self._chains is not None and has_chains:
            second = self._second(self._chains, state, probabilities)
            return self._chains.trees(roots, probabilities, second, max_nodes)
        return [
            DraftTree.from_trie_mass(root, self._trie.token_ids, self._trie.parents, best.values, best.nodes)
            for root, best in zip(roots, self._trie.most_valuable(probabilities, max_nodes), strict=True)
        ]

    def _probabilities(self, state: Tensor) -> Tensor:
        """fp32 [M, E]; those that a speculated vocabulary does not score have none."""
        if self._vocabulary is None:
            return torch.softmax(self._head.phrase_scores(state).float(), dim=-1)
        found = self._vocabulary.candidates(state)
        chances = found.log_probs.exp()
        ids = found.ids_at(torch.arange(chances.shape[1], device=state.device).expand(len(state), -1))
        every = chances.new_zeros(len(state), self._vocabulary.num_entries)
        return every.scatter_(1, ids, chances)

    def _second(self, chains: PhraseChains, state: Tensor, probabilities: Tensor) -> SecondPhrases:
        """What the step guesses behind the likeliest phrases of every row."""
        entries = chains.likeliest(probabilities)
        token_ids, lengths = chains.token_ids_of(entries)
        last, mean = phrase_embeddings(self._embed(token_ids), lengths)
        states = state[:, None].expand(-1, entries.shape[1], -1)
        scores = self._head.chained_scores(*[part.flatten(0, 1) for part in (states, last, mean)])
        followers = torch.softmax(scores.float(), dim=-1)[:, :-1]
        return SecondPhrases(entries, followers.view(*entries.shape, -1))


def speculated_phrases(head: PhraseHead, num_candidates: int) -> SpeculativeVocabulary | None:
    """The speculated vocabulary of a head with a ranking; None for a head that scores all phrases."""
    if head.ranking is None:
        return None
    layer = OutputLayer(head.output.weight, head.output.bias)
    return SpeculativeVocabulary(layer, head.ranking, min(num_candidates, layer.num_entries))


def phrase_embeddings(embedded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Embedding of the last token, and mean of all.

    Args:
        embedded: [..., L, D], embeddings of the tokens of a phrase, padded.
        lengths: int64 [...], tokens of each phrase.

    Returns:
        fp32 [..., D] twice.
    """
    embedded = embedded.float()
    is_token = torch.arange(embedded.shape[-2], device=lengths.device) < lengths[..., None]
    mean = (embedded * is_token[..., None]).sum(-2) / lengths[..., None]
    place = (lengths - 1)[..., None, None].expand(*lengths.shape, 1, embedded.shape[-1])
    return embedded.gather(-2, place)[..., 0, :], mean
