"""Tiny GGUF files, written with the `gguf` package, so that no test needs a real one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
GEMMA_HEAD_DIM = 256  # transformers takes the query scale of Gemma to be 1/16 whatever the file says
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTE_LEVEL_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
GEMMA_TOKENS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<end_of_turn>", "\n", "\n\n", "  ", "   "),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("\u2581", "t", "h", "e", "c", "a", "s", "o", "n", "m", "i", "1", "2", ".", ","),
    *("th", "\u2581t", "he", "\u2581th", "\u2581the", "the", "at", "cat", "\u2581c", "\u2581cat", "the cat"),
    *("on", "\u2581on", "sat", "\u2581s", "\u2581sat", "mat", "ma", "\u2581m", "\u2581mat", "in", "is"),
]


@dataclass
class TinyGguf:
    """What to write; `tensors` and `values` replace or add entries, None removes one."""

    architecture: str = "llama"
    tied: bool = True
    quantized: bool = True
    seed: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = CHAT_TEMPLATE
    pre: str = "smollm"


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """A few hundred tokens: specials, the byte alphabet, and what some merges make."""
    from tokenizers import pre_tokenizers

    tokens = [*BYTE_LEVEL_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    words = ("t h", "th e", "Ġ the", "Ġ c", "a t", "Ġc at", "Ġ s", "Ġs at", "i n", "o n", "Ġ on")
    for merge in (*words, "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ"):
        merges.append(merge)
        tokens.append(merge.replace(" ", ""))
    while len(tokens) % 32:
        tokens.append(f"<unused{len(tokens)}>")
    return tokens, merges


def _write_tokenizer(writer: Any, tiny: TinyGguf) -> int:
    if tiny.architecture == "gemma3":
        tokens = [*GEMMA_TOKENS]
        kinds = [3] * 6 + [4] * 4 + [6] * 256
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        ids = {"bos": 2, "eos": 1, "unk": 3, "pad": 0}
        writer.add_add_bos_token(True)
    else:
        tokens, merges = byte_level_vocabulary()
        kinds = [3, 3, 3, 4]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(tiny.pre)
        writer.add_token_merges(merges)
        ids = {"bos": 1, "eos": 0, "unk": 0, "pad": 2}
        writer.add_add_bos_token(False)
    writer.add_token_list(tokens)
    writer.add_token_types([*kinds, *[1] * (len(tokens) - len(kinds))])
    for role, token_id in ids.items():
        getattr(writer, f"add_{role}_token_id")(token_id)
    if tiny.chat_template is not None:
        writer.add_chat_template(tiny.chat_template)
    return len(tokens)


def _shapes(tiny: TinyGguf, vocab_size: int) -> dict[str, tuple[int, ...]]:
    head_dim = GEMMA_HEAD_DIM if tiny.architecture == "gemma3" else HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN)}
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tiny.tied:
        shapes["output.weight"] = (vocab_size, HIDDEN)
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * head_dim, HIDDEN),
            "attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            "attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * head_dim),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if tiny.architecture == "gemma3":
            block |= {f"{name}.weight": (HIDDEN,) for name in ("post_attention_norm", "post_ffw_norm")}
            block |= {f"{name}.weight": (head_dim,) for name in ("attn_q_norm", "attn_k_norm")}
        if tiny.architecture == "qwen2":
            block |= {"attn_q.bias": (HIDDEN,)}
            block |= {f"attn_{name}.bias": (KV_HEADS * head_dim,) for name in "kv"}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def write_gguf(path: Path, tiny: TinyGguf) -> str:
    """Write a random model as one GGUF file; the answer is its SHA-256."""
    import gguf

    writer = gguf.GGUFWriter(path, tiny.architecture)
    name = tiny.architecture
    defaults: dict[str, Any] = {
        f"{name}.context_length": 128,
        f"{name}.embedding_length": HIDDEN,
        f"{name}.block_count": LAYERS,
        f"{name}.feed_forward_length": INNER,
        f"{name}.attention.head_count": HEADS,
        f"{name}.attention.head_count_kv": KV_HEADS,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{name}.rope.freq_base": 100000.0,
    }
    if name == "gemma3":
        defaults |= {f"{name}.attention.key_length": GEMMA_HEAD_DIM, f"{name}.attention.sliding_window": 8}
    else:
        defaults[f"{name}.rope.dimension_count"] = HIDDEN // HEADS
    writer.add_name("tiny")
    for key, value in (defaults | tiny.values).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add[type(value)](key, value)
    vocab_size = _write_tokenizer(writer, tiny)
    random = np.random.default_rng(tiny.seed)
    tensors: dict[str, Any] = {}
    for key, shape in _shapes(tiny, vocab_size).items():
        spread = random.standard_normal(shape).astype(np.float32)
        tensors[key] = 1 + 0.1 * spread if key.endswith("norm.weight") else 0.3 * spread
    kinds = gguf.GGMLQuantizationType
    for key, tensor in (tensors | tiny.tensors).items():
        if tensor is None:
            continue
        kind = kinds.Q8_0 if key == "token_embd.weight" else kinds.Q4_1
        if tiny.quantized and tensor.ndim == 2:
            writer.add_tensor(key, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Makes a tiny GGUF file; keyword arguments are the fields of TinyGguf."""

    def make(name: str = "tiny.gguf", **settings: Any) -> Path:
        path = tmp_path / name
        write_gguf(path, TinyGguf(**settings))
        return path

    return make
