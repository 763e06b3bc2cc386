"""The GGUF file that llama.cpp is given: the same weights, in its order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from paceline.bench.peers import gguf_export
from paceline.bench.peers.gguf_export import export_gguf
from paceline.errors import ConfigError, UnsupportedFeatureError
from paceline.targets.gguf import convert_gguf
from paceline.testing import TINY_VOCAB, tiny_model

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def export(model, tokenizer, folder, precision="bf16", fingerprint="f" * 16):
    return export_gguf(model, tokenizer, folder, fingerprint=fingerprint, precision=precision)


def stored_tensors(path):
    """Name -> float32 values as they are in the file."""
    found = {}
    for tensor in GGUFReader(path).tensors:
        rows = [int(size) for size in reversed(tensor.shape)]
        found[tensor.name] = dequantize(tensor.data, tensor.tensor_type).reshape(rows)
    return found


def in_rotary_order(weight, num_heads):
    """Row by row: pair i of a head, which the model keeps at i and i + half, lies at 2i and 2i + 1."""
    rows = np.empty_like(weight)
    width = len(weight) // num_heads
    for head in range(num_heads):
        for pair in range(width // 2):
            for side in range(2):
                rows[head * width + 2 * pair + side] = weight[head * width + side * (width // 2) + pair]
    return rows


def expected_tensors(model):
    """Name -> values that the file should hold."""
    state = {name: weight.float().numpy() for name, weight in model.state_dict().items()}
    expected = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        expected["output.weight"] = state["lm_head.weight"]
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for layer in range(model.config.num_hidden_layers):
        for own, stored in NAMES.items():
            values = state[f"model.layers.{layer}.{own}.weight"]
            if stored in heads:
                values = in_rotary_order(values, heads[stored])
            expected[f"blk.{layer}.{stored}.weight"] = values
    return expected


def rounded(values):
    return torch.from_numpy(values).to(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_every_tensor_is_the_models_own_in_llama_cpps_order(architecture, tokenizer, tmp_path):
    model = tiny_model(architecture)
    stored, expected = stored_tensors(export(model, tokenizer, tmp_path)), expected_tensors(model)
    assert stored.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(stored[name], rounded(values) if values.ndim == 2 else values), name


def test_query_and_key_rows_are_really_moved(tokenizer, tmp_path):
    model = tiny_model("llama")
    stored = stored_tensors(export(model, tokenizer, tmp_path))["blk.0.attn_q.weight"]
    assert not np.array_equal(stored, rounded(model.model.layers[0].self_attn.q_proj.weight.detach().numpy()))


@pytest.mark.parametrize("settings", [{}, {"head_dim": 16}, {"tie_word_embeddings": True}])
def test_the_file_read_back_gives_the_models_own_logits(settings, tokenizer, tmp_path):
    """`targets/gguf_layout.py` reads what llama.cpp reads; it was tested against llama.cpp's own files."""
    from transformers import AutoModelForCausalLM

    model = tiny_model(
        "llama",
        rope_parameters={"rope_type": "default", "rope_theta": 321.0},
        rms_norm_eps=2.0**-9,
        **settings,
    )
    for parameter in model.parameters():  # what the file can hold
        parameter.data = parameter.data.to(torch.bfloat16).float()
    convert_gguf(export(model, tokenizer, tmp_path), tmp_path / "converted", sha256="0")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_q8_0_is_within_half_a_step_of_every_weight(tokenizer, tmp_path):
    model = tiny_model("llama")
    stored, expected = (
        stored_tensors(export(model, tokenizer, tmp_path, "q8_0")),
        expected_tensors(model),
    )
    for name, values in expected.items():
        if values.ndim == 1:
            assert np.array_equal(stored[name], values)
            continue
        blocks = values.reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / 127
        # The step itself is stored in half precision: a relative 2^-11 of up to 127 steps.
        error = np.abs(stored[name].reshape(-1, 32) - blocks)
        assert (error <= step * (0.5 + 127 * 2.0**-11) + 1e-7).all(), name
        assert error.max() > 0


def test_the_vocabulary_has_a_token_and_a_kind_for_every_id(tokenizer, tmp_path):
    reader = GGUFReader(export(tiny_model("llama", vocab_size=128), tokenizer, tmp_path))
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    assert tokens[:TINY_VOCAB] == tokenizer.convert_ids_to_tokens(range(TINY_VOCAB))
    assert tokens[TINY_VOCAB:] == [f"[PAD{i}]" for i in range(TINY_VOCAB, 128)]
    assert kinds == [3] * 3 + [1] * (TINY_VOCAB - 3) + [5] * (128 - TINY_VOCAB)
    assert reader.fields["tokenizer.ggml.merges"].contents()[:2] == ["t h", "Ġ t"]
    ids = {
        key: reader.fields[f"tokenizer.ggml.{key}_token_id"].contents() for key in ("bos", "eos", "padding")
    }
    assert ids == {"bos": 1, "eos": 2, "padding": 0}


def test_a_file_is_written_once_and_named_after_weights_dtype_and_precision(tokenizer, tmp_path, monkeypatch):
    model = tiny_model("llama")
    first = export(model, tokenizer, tmp_path)
    others = [
        export(model, tokenizer, tmp_path, "q8_0"),
        export(model, tokenizer, tmp_path, fingerprint="e" * 16),
        export(tiny_model("llama", dtype=torch.bfloat16), tokenizer, tmp_path),
    ]
    assert len({first, *others}) == 4
    monkeypatch.setattr(gguf_export, "_write", lambda *_: pytest.fail("written again"))
    assert export(model, tokenizer, tmp_path) == first


def test_a_write_that_fails_leaves_nothing_behind(tokenizer, tmp_path, monkeypatch):
    def fail(tensor, precision):
        raise OSError("disk full")

    monkeypatch.setattr(gguf_export, "_encoded", fail)
    with pytest.raises(OSError, match="disk full"):
        export(tiny_model("llama"), tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("qwen2", {}, "qwen2"),
        ("gpt2", {}, "gpt2"),
        ("llama-wide-heads", {}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_parameters": LLAMA3}, "rope_type"),
    ],
)
def test_what_would_not_be_the_same_model_is_refused(architecture, settings, named, tokenizer, tmp_path):
    with pytest.raises(UnsupportedFeatureError, match=named):
        export(tiny_model(architecture, **settings), tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_q8_0_refuses_rows_that_are_no_whole_blocks(tokenizer, tmp_path):
    model = tiny_model("llama", intermediate_size=40)
    with pytest.raises(UnsupportedFeatureError, match="rows of 40"):
        export(model, tokenizer, tmp_path, "q8_0")
    assert export(model, tokenizer, tmp_path, "bf16").is_file()


def test_an_unknown_precision_names_the_nearest(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="q8_0"):
        export(tiny_model("llama"), tokenizer, tmp_path, "q8")


def test_a_tokenizer_that_is_not_bpe_is_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(UnsupportedFeatureError, match="WordLevel"):
        export(tiny_model("llama"), words, tmp_path)
