"""Apparatus for tests, ours and those of people who add a drafter: tiny models, an oracle, replayed drafts.

A tiny model is random, with its weights scaled up: with plain initialisation the logits are nearly flat and
greedy decoding says nothing. The oracle decodes without a cache, so it shares no code with what it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from paceline.config import check_known
from paceline.sequence import Sequence, VerifyResult
from paceline.targets.base import TargetModel, TargetOutput
from paceline.tree import DraftTree

TINY_VOCAB = 96
TINY_EOS = 2
WEIGHT_SCALE = 15.0
_COMMON = {"vocab_size": TINY_VOCAB, "bos_token_id": 1, "eos_token_id": TINY_EOS, "pad_token_id": 0}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# Name -> (model class, configuration class, settings). Every one is supported and runs the conformance tests.
TINY_ARCHITECTURES: Mapping[str, tuple[str, str, dict[str, Any]]] = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA_LIKE),
        "llama-wide-heads": (
            "LlamaForCausalLM",
            "LlamaConfig",
            {
                **_LLAMA_LIKE,
                "head_dim": 24,
                "num_key_value_heads": 1,
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA_LIKE, "tie_word_embeddings": True}),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA_LIKE),
        "qwen2-sliding": (
            "Qwen2ForCausalLM",
            "Qwen2Config",
            {**_LLAMA_LIKE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        ),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA_LIKE, "head_dim": 16}),
        "mistral": ("MistralForCausalLM", "MistralConfig", {**_LLAMA_LIKE, "sliding_window": None}),
        "mistral-sliding": ("MistralForCausalLM", "MistralConfig", {**_LLAMA_LIKE, "sliding_window": 8}),
        "gemma2": (
            "Gemma2ForCausalLM",
            "Gemma2Config",
            {**_LLAMA_LIKE, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 4},
        ),
        "gemma3": (
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            {**_LLAMA_LIKE, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6},
        ),
        "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_LLAMA_LIKE, "sliding_window": None}),
        "phi3-sliding": ("Phi3ForCausalLM", "Phi3Config", {**_LLAMA_LIKE, "sliding_window": 8}),
        "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA_LIKE),
        "granite": (
            "GraniteForCausalLM",
            "GraniteConfig",
            {**_LLAMA_LIKE, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        ),
        "cohere": ("CohereForCausalLM", "CohereConfig", {**_LLAMA_LIKE, "logit_scale": 0.25}),
        "gpt2": (
            "GPT2LMHeadModel",
            "GPT2Config",
            {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
        ),
        "gpt2-short": (
            "GPT2LMHeadModel",
            "GPT2Config",
            {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        ),
        "gpt-neox": (
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            {
                **_COMMON,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 256,
            },
        ),
    }
)


def tiny_model(
    architecture: str = "llama",
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    **overrides: Any,
) -> Any:
    """A random model of a few thousand parameters, with logits that are far from flat.

    Args:
        architecture: a key of TINY_ARCHITECTURES.
        seed: of the weights; the global generator is left as it was.
        dtype: of the weights.
        attention: Hugging Face attention implementation; by default sdpa where the architecture has it.
        overrides: settings of the configuration to change.
    """
    import transformers

    check_known("tiny architecture", architecture, TINY_ARCHITECTURES)
    model_class, config_class, settings = TINY_ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**{**settings, **overrides})
    config._attn_implementation = attention or ("eager" if architecture == "gemma2" else "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            for parameter in model.parameters():
                # An untouched embedding keeps the residual stream from merely repeating the last token.
                if parameter.dim() > 1 and parameter is not embedding:
                    parameter.mul_(WEIGHT_SCALE)
    return model.to(dtype).eval()


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of TINY_VOCAB entries with a chat template, built in memory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<s>", "</s>"]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [
        s for s in symbols if s in "ĠĊabcdefghijklmnopqrstuvwxyz0123456789.,!?'-+=()ABCDEFGHIJKLMNOPQRSTUVW"
    ]
    vocabulary = {token: i for i, token in enumerate([*specials, *plain])}
    merges = []
    for left, right in (("t", "h"), ("Ġ", "t"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġt", "h"), ("Ġ", "a")):
        if len(vocabulary) < TINY_VOCAB and left in vocabulary and right in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    for number in range(TINY_VOCAB - len(vocabulary)):
        vocabulary[f"<unused{number}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = (
        "{% for message in messages %}{{ '<s>' + message['role'] + '\\n' }}"
        "{{ message['content'] + '</s>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
    )
    return wrapped


@torch.inference_mode()
def greedy_oracle(
    model: Any,
    prompt_ids: Seq[int],
    max_new_tokens: int,
    *,
    eos_token_ids: Seq[int] = (),
    process: Callable[[Tensor, list[int]], Tensor] | None = None,
) -> list[int]:
    """Step-by-step greedy decoding that re-runs the whole prefix every time: no cache, no mask, no batch.

    Args:
        model: Hugging Face causal LM.
        prompt_ids: prompt.
        max_new_tokens: most tokens.
        eos_token_ids: ids that end the text (included).
        process: changes the logits [V] given all ids so far.
    """
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        logits = (
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].float()
        )
        if process is not None:
            logits = process(logits, ids)
        ids.append(int(logits.argmax()))
        if ids[-1] in eos_token_ids:
            break
    return ids[len(prompt_ids) :]


class ReplayDrafter:
    """Drafts from recorded continuations: any acceptance length, without trained weights.

    Args:
        recorded: prompt ids -> the continuation to replay.
        length: drafted tokens a round.
        wrong: position within each draft whose token is replaced by another; None for a perfect draft.
        decoys: drafted as a tree with wrong branches, laid out breadth-first so that the true branch is not
            contiguous.
        vocab_size: for choosing other tokens.
    """

    required_features: tuple[int, ...] = ()

    def __init__(
        self,
        recorded: Mapping[tuple[int, ...], Seq[int]],
        length: int,
        *,
        wrong: int | None = None,
        decoys: bool = False,
        vocab_size: int = TINY_VOCAB,
    ) -> None:
        self.recorded = recorded
        self.length = length
        self.wrong = wrong
        self.decoys = decoys
        self.vocab_size = vocab_size
        self.seen: dict[Sequence, list[int]] = {}

    @classmethod
    def build(cls, target: TargetModel, head: Path | None, num_speculative_tokens: int) -> Self:
        """A drafter with nothing recorded."""
        return cls({}, num_speculative_tokens, vocab_size=target.vocab_size)

    def propose(self, sequences: Seq[Sequence], max_nodes: int) -> list[DraftTree]:
        """The next recorded tokens of each sequence, spoilt as asked."""
        return [self._tree(sequence).take(max_nodes) for sequence in sequences]

    def observe(self, output: TargetOutput, results: Seq[VerifyResult | None]) -> None:
        """Remember what every sequence holds, for tests of the trimmed history."""
        for segment in output.segments:
            self.seen[segment.sequence] = segment.sequence.token_ids

    def release(self, sequence: Sequence) -> None:
        """Keep `seen`: tests look at it afterwards."""

    def _other(self, token_id: int) -> int:
        return (token_id + 7) % self.vocab_size

    def _tree(self, sequence: Sequence) -> DraftTree:
        done = len(sequence.output_ids)
        chain = list(self.recorded.get(tuple(sequence.prompt_ids), ())[done : done + self.length])
        if self.wrong is not None and self.wrong < len(chain):
            chain[self.wrong] = self._other(chain[self.wrong])
        root = sequence.last_token_id
        if not self.decoys:
            return DraftTree.from_chain(root, chain)
        token_ids, parents, above = [root], [-1], 0
        for token_id in chain:
            # A decoy before and after the true node: the true branch sits at 2, 5, 8, ...
            token_ids += [self._other(token_id), token_id, self._other(token_id + 1)]
            parents += [above] * 3
            above = len(token_ids) - 2
        return DraftTree(torch.tensor(token_ids), torch.tensor(parents), torch.ones(len(token_ids)))
