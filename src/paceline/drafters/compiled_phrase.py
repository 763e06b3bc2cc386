"""The phrase drafter's arithmetic in one call of the compiled kernels (`kernels/phrase.cpp`).

Drafting runs between two forwards, so its time is lost to both. In torch it is some twenty operations, each
of which wakes the threads; here the output layer is read once, in the order of the trie, and the tree comes
out.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.heads.phrase import PhraseHead, PhraseStep
from paceline.kernels import abi
from paceline.kernels.build import loaded_kernels
from paceline.kernels.packing import pack_bias, pack_weight
from paceline.tree import DraftTree
from paceline.vocabularies.chains import CHAINED_PHRASES, FOLLOWER_NODES
from paceline.vocabularies.speculative import DEFAULT_NUM_CANDIDATES
from paceline.vocabularies.trie import TIE, TokenTrie

ALIGNMENT = 16
_DTYPES = {torch.float32: abi.FP32, torch.bfloat16: abi.BF16}


class CompiledPhrases:
    """Head and tries, packed.

    Args:
        head: frozen, on the CPU, its trunk in fp32.
        trie: of its vocabulary.
        token_ids: tokens of each phrase.
        embeddings: [V, D], input embeddings; read by a head with a step only.
        library: the kernels.
        num_candidates: phrases that a head with a ranking scores.
    """

    def __init__(
        self,
        head: PhraseHead,
        trie: TokenTrie,
        token_ids: Seq[tuple[int, ...]],
        embeddings: Tensor | None,
        library: ctypes.CDLL,
        num_candidates: int = DEFAULT_NUM_CANDIDATES,
    ) -> None:
        self._library = library
        self._library.paceline_phrase_new.restype = ctypes.c_void_p
        self._kept: list[Tensor] = []
        layers, norms = self._stack(head)
        # Phrases in the order of their tokens: those beneath a node lie side by side.
        order = trie.entry_order
        output = head.output
        packed_head = abi.PhraseHead(
            layers=layers,
            norms=norms,
            output=self._output(head, order),
            depth=len(head.layers),
            num_inputs=head.config.num_inputs,
            input_size=head.config.hidden_size,
            output_dtype=_DTYPES[output.weight.dtype],
            norm_eps=self._eps(head),
            input_eps=torch.finfo(torch.float32).eps,
            **self._ranking(head, order, num_candidates),
        )
        packed_trie, packed_chain = self._trie(trie), self._chain(head, trie, token_ids, embeddings)
        self._drafter = ctypes.c_void_p(
            library.paceline_phrase_new(
                ctypes.byref(packed_head),
                ctypes.byref(packed_trie),
                ctypes.byref(packed_chain),
                ctypes.c_int32(torch.get_num_threads()),
            )
        )
        weakref.finalize(self, library.paceline_phrase_free, self._drafter)

    @classmethod
    def where_possible(
        cls,
        head: PhraseHead,
        trie: TokenTrie,
        token_ids: Seq[tuple[int, ...]],
        embeddings: Tensor | None = None,
        num_candidates: int = DEFAULT_NUM_CANDIDATES,
    ) -> CompiledPhrases | None:
        """Packed, when the kernels are loaded (the target is on the fast path) and sizes fit; else None."""
        library = loaded_kernels()
        weight = head.output.weight
        sizes = (head.config.hidden_size, *head.config.layer_widths)
        if library is None or weight.device.type != "cpu" or any(size % ALIGNMENT for size in sizes):
            return None
        if head.trunk_dtype != torch.float32 or weight.dtype not in _DTYPES:
            return None
        if head.step is not None and (embeddings is None or embeddings.dtype not in _DTYPES):
            return None
        return cls(head, trie, token_ids, embeddings, library, num_candidates)

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
        inputs = inputs.float().contiguous()
        shape = (len(roots), max_nodes + 1)
        newest, counts = torch.tensor(roots), torch.empty(len(roots), dtype=torch.int64)
        tokens, parents = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
        values = torch.empty(shape)
        arrays = (inputs, newest, tokens, parents, values, counts)
        call = abi.Drafts(len(roots), max_nodes, has_chains, *[array.data_ptr() for array in arrays])
        self._library.paceline_phrase_draft(self._drafter, ctypes.byref(call))
        return [
            DraftTree(tokens[row, :count], parents[row, :count], values[row, :count])
            for row, count in enumerate(counts.tolist())
        ]

    def _output(self, head: PhraseHead, order: Tensor) -> abi.Linear:
        """Scores of all phrases; packed where they are all computed."""
        output = head.output
        if head.ranking is None:
            return self._pack(output.weight[order], output.bias[order])
        return abi.Linear(None, None, output.in_features, output.out_features)

    def _ranking(self, head: PhraseHead, order: Tensor, num_candidates: int) -> dict[str, Any]:
        """What chooses the phrases that are scored, and their rows as they are; nothing without it."""
        if head.ranking is None:
            return {}
        down, table, output = head.ranking.down.weight, head.ranking.vocabulary.weight, head.output
        # To whole vectors, with columns that add nothing.
        missing = -len(down) % ALIGNMENT
        down, table = functional.pad(down.float(), (0, 0, 0, missing)), functional.pad(table, (0, missing))
        return {
            "narrowing": self._pack(down, down.new_zeros(len(down))),
            "table": self._pack(table[order].to(output.weight.dtype), output.bias[order]),
            "rows": self._keep(output.weight[order]),
            "row_bias": self._keep(output.bias[order].float()),
            "num_candidates": min(num_candidates, output.out_features),
        }

    def _stack(self, module: PhraseHead | PhraseStep) -> tuple[Any, Any]:
        """Layers and the norms behind them."""
        layers = (abi.Linear * len(module.layers))(*[self._linear(layer) for layer in module.layers])
        return layers, (abi.Norm * len(module.norms))(*[self._norm(norm) for norm in module.norms])

    def _trie(self, trie: TokenTrie) -> abi.Trie:
        arrays = (trie.token_ids, trie.parents, trie.depths, trie.starts, trie.ends)
        return abi.Trie(
            *[self._keep(array.to(torch.int32)) for array in arrays], len(trie), trie.num_entries, TIE
        )

    def _chain(
        self,
        head: PhraseHead,
        trie: TokenTrie,
        token_ids: Seq[tuple[int, ...]],
        embeddings: Tensor | None,
    ) -> abi.Chain:
        """The step, the phrases that it leads to, and the tokens of those that it starts from."""
        if head.step is None or embeddings is None:
            return abi.Chain()
        layers, norms = self._stack(head.step)
        followers = TokenTrie(token_ids[: head.config.chain_entries])
        order, other, output = followers.entry_order, head.step.other, head.output
        weight = torch.cat([output.weight[order], other.weight.to(output.weight.dtype)])
        bias = torch.cat([output.bias[order].float(), other.bias.float()])
        entries = [token_ids[entry] for entry in trie.entry_order.tolist()]
        starts = torch.tensor([0, *map(len, entries)]).cumsum(0)
        return abi.Chain(
            layers=layers,
            norms=norms,
            output=self._pack(weight, bias),
            followers=self._trie(followers),
            entry_starts=self._keep(starts.to(torch.int32)),
            entry_tokens=self._keep(torch.tensor([i for ids in entries for i in ids], dtype=torch.int32)),
            embeddings=self._keep(embeddings),
            embeddings_dtype=_DTYPES[embeddings.dtype],
            num_first=min(CHAINED_PHRASES, len(entries)),
            min_nodes=FOLLOWER_NODES,
        )

    def _linear(self, layer: Any) -> abi.Linear:
        return self._pack(layer.weight, layer.bias)

    def _norm(self, norm: Any) -> abi.Norm:
        return abi.Norm(self._keep(norm.weight.float()), self._keep(norm.bias.float()))

    def _pack(self, weight: Tensor, bias: Tensor) -> abi.Linear:
        num_out, num_in = weight.shape
        return abi.Linear(self._keep(pack_weight(weight)), self._keep(pack_bias(bias)), num_in, num_out)

    @staticmethod
    def _eps(head: PhraseHead) -> float:
        first: Any = head.norms[0]
        return float(first.eps)

    def _keep(self, tensor: Tensor | None) -> int:
        """Address of a tensor that lives as long as this object."""
        assert tensor is not None
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()
