"""A GGUF file is converted once, exactly, and nothing half-made is ever trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import CheckpointError, PacelineError, UnsupportedFeatureError
from paceline.targets import gguf as conversion
from paceline.targets.aliases import file_sha256
from paceline.targets.gguf import HALF_FOLDER, MARKER_NAME, convert_gguf, is_converted


def converted(path: Path, name: str = "out") -> Path:
    folder = path.parent / name
    convert_gguf(path, folder, sha256=file_sha256(path))
    return folder


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def by_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def left_beside(path: Path) -> set[str]:
    return {entry.name for entry in path.parent.iterdir()} - {path.name}


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen2"])
def test_weights_and_configuration_equal_those_of_transformers(
    tiny_gguf: Callable[..., Path], architecture: str
) -> None:
    path = tiny_gguf(architecture=architecture)
    ours, reference = loaded(converted(path)), by_transformers(path)
    expected = reference.state_dict()
    assert set(ours.state_dict()) == set(expected)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    token_ids = torch.arange(5, 29)[None]
    with torch.no_grad():
        assert torch.equal(ours(token_ids).logits, reference(token_ids).logits)
    assert not hasattr(ours.config, "quantization_config")


def test_byte_level_tokenizer_splits_as_gpt2_does(tiny_gguf: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted(tiny_gguf()))
    expected = {
        "": [],
        "the cat sat on": ["the", "Ġcat", "Ġsat", "Ġon"],
        "a     10\n\nin": ["a", "ĠĠĠĠ", "Ġ", "1", "0", "Ċ", "Ċ", "in"],
        "<|im_start|>the<|im_end|>\n": ["<|im_start|>", "the", "<|im_end|>", "Ċ"],
        "the<tool>in<|endoftext|>": ["the", "<tool>", "in", "<|endoftext|>"],
        "é🦊": ["Ã", "©", "ð", "Ł", "¦", "Ĭ"],
    }
    for text, tokens in expected.items():
        token_ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(token_ids) == tokens
        assert tokenizer.decode(token_ids) == text
    token_ids = tokenizer("<|im_start|>the<tool><|im_end|>")["input_ids"]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "the<tool>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, 2)


def test_gemma_tokenizer_recovers_the_merges_and_begins_with_bos(tiny_gguf: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted(tiny_gguf(architecture="gemma3")))
    expected = {
        "": [],
        "the cat sat on the mat": ["the", "▁cat", "▁sat", "▁on", "▁the", "▁mat"],
        "a  the\n\nin": ["a", "▁▁", "the", "\n\n", "in"],
        "is<end_of_turn>\n": ["is", "<end_of_turn>", "\n"],
        "é": ["<0xC3>", "<0xA9>"],
    }
    for text, tokens in expected.items():
        token_ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(token_ids) == ["<bos>", *tokens]
        assert tokenizer.decode(token_ids) == "<bos>" + text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)


def test_recovered_merges_take_earlier_tokens_and_longer_left_parts_first(
    tiny_gguf: Callable[..., Path],
) -> None:
    folder = converted(tiny_gguf(architecture="gemma3"))
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    ranks = {tuple(merge): rank for rank, merge in enumerate(merges)}
    assert ranks["t", "h"] < ranks["▁", "t"] < ranks["h", "e"] < ranks["th", "e"] < ranks["t", "he"]


def test_tokenizer_of_another_kind_is_the_one_of_transformers(tiny_gguf: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    path = tiny_gguf(pre="qwen2")
    ours = AutoTokenizer.from_pretrained(converted(path))
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("the cat", "a  10   b\n\n1. x\t", "<|im_start|>the<tool>"):
        assert ours(text)["input_ids"] == reference(text)["input_ids"]


def test_chat_template_of_the_file_is_used(tiny_gguf: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "the cat"}]
    for pre in ("smollm", "qwen2"):
        tokenizer = AutoTokenizer.from_pretrained(converted(tiny_gguf(f"{pre}.gguf", pre=pre), pre))
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    bare = AutoTokenizer.from_pretrained(converted(tiny_gguf("bare.gguf", chat_template=None), "bare"))
    assert bare.chat_template is None


def test_tied_output_layer_is_not_written_and_equals_the_embedding(tiny_gguf: Callable[..., Path]) -> None:
    folder = converted(tiny_gguf())
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = loaded(folder)
    assert model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)


def test_separate_output_layer_is_written(tiny_gguf: Callable[..., Path]) -> None:
    folder = converted(tiny_gguf(tied=False))
    model = loaded(folder)
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])
    assert not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)


def test_output_layer_stored_twice_becomes_a_tied_one(tiny_gguf: Callable[..., Path]) -> None:
    plain = load_file(converted(tiny_gguf(quantized=False)) / "model.safetensors")
    embedding = plain["model.embed_tokens.weight"].numpy()
    folder = converted(
        tiny_gguf("twice.gguf", quantized=False, tensors={"output.weight": embedding}), "twice"
    )
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_second_copy_holds_the_same_weights_rounded(tiny_gguf: Callable[..., Path]) -> None:
    folder = converted(tiny_gguf())
    full, half = (
        load_file(folder / "model.safetensors"),
        load_file(folder / HALF_FOLDER / "model.safetensors"),
    )
    assert full.keys() == half.keys()
    for name, tensor in full.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(half[name], tensor.to(torch.bfloat16))
    assert json.loads((folder / HALF_FOLDER / "config.json").read_text())["dtype"] == "bfloat16"


def test_values_that_bfloat16_holds_exactly_are_stored_once(tiny_gguf: Callable[..., Path]) -> None:
    plain = load_file(converted(tiny_gguf(quantized=False), "plain") / "model.safetensors")
    assert plain["model.norm.weight"].dtype == torch.float32
    tensors = tiny_tensors_of(tiny_gguf("source.gguf", quantized=False))
    exact = {name: torch.tensor(tensor).bfloat16().float().numpy() for name, tensor in tensors.items()}
    folder = converted(tiny_gguf("exact.gguf", quantized=False, tensors=exact), "exact")
    assert not (folder / HALF_FOLDER).exists()
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert np.array_equal(stored["model.norm.weight"].float().numpy(), exact["output_norm.weight"])


def tiny_tensors_of(path: Path) -> dict[str, Any]:
    from paceline.targets.gguf_file import GgufFile

    file = GgufFile.open(path)
    return {
        name: np.concatenate([chunk.copy() for chunk in file.float_chunks(tensor)]).reshape(tensor.shape)
        for name, tensor in file.tensors.items()
    }


def test_large_tensors_are_dequantised_in_pieces_alike(
    tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf()
    whole = load_file(converted(path) / "model.safetensors")
    monkeypatch.setattr("paceline.targets.gguf_file._CHUNK_ELEMENTS", 7 * 64)
    pieces = load_file(converted(path, "pieces") / "model.safetensors")
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_eos_ids_include_the_end_of_turn_of_the_chat_template(tiny_gguf: Callable[..., Path]) -> None:
    with_template = json.loads((converted(tiny_gguf()) / "generation_config.json").read_text())
    assert with_template == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [0, 2]}
    bare = converted(tiny_gguf("bare.gguf", chat_template=None), "bare")
    assert json.loads((bare / "generation_config.json").read_text())["eos_token_id"] == 0


def test_linear_rotary_scaling_is_carried_over(tiny_gguf: Callable[..., Path]) -> None:
    folder = converted(
        tiny_gguf(values={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    )
    rope = loaded(folder).config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 4.0, 100000.0)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen2"])
def test_rotary_scaling_that_would_be_lost_is_refused_by_name(
    tiny_gguf: Callable[..., Path], architecture: str
) -> None:
    path = tiny_gguf(architecture=architecture, values={f"{architecture}.rope.scaling.type": "yarn"})
    with pytest.raises(UnsupportedFeatureError, match="yarn"):
        converted(path)
    assert left_beside(path) <= {"out.lock"}


def llama3_factors(factor: float) -> Any:
    """From transformers, as an independent source."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 100000.0, "factor": factor, **scaling}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=32768
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (100000.0 ** (torch.arange(0, 16, 2) / 16))
    return (plain / scaled).numpy().astype(np.float32)


def test_rotary_factors_of_llama_3_become_its_parameters(tiny_gguf: Callable[..., Path]) -> None:
    factors = llama3_factors(32.0)
    assert factors.max() > 30 > 2 > factors.min()
    rope = loaded(converted(tiny_gguf(tensors={"rope_freqs.weight": factors}))).config.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"]) == ("llama3", 100000.0)
    assert rope["factor"] == pytest.approx(32.0)
    strange = tiny_gguf("strange.gguf", tensors={"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)})
    with pytest.raises(UnsupportedFeatureError, match="rotary"):
        converted(strange, "strange")


@pytest.mark.parametrize("keep", [0, 3, 20, 0.2, 0.6, 0.999])
def test_truncated_file_is_refused_in_one_line_and_leaves_nothing(
    tiny_gguf: Callable[..., Path], keep: float
) -> None:
    path = tiny_gguf()
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError) as caught:
        converted(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    assert left_beside(path) <= {"out.lock"}


def test_damaged_headers_never_end_in_a_foreign_error(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf()
    content = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for attempt in range(60):
        damaged = bytearray(content)
        for position in random.integers(4, 1200, 3):
            damaged[position] = random.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            converted(path, f"out{attempt}")
        except PacelineError:
            refused += 1
            assert not (path.parent / f"out{attempt}").exists()
    assert refused > 10


def test_part_of_a_split_file_is_refused(tiny_gguf: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedFeatureError, match="split into 3"):
        converted(tiny_gguf(values={"split.count": 3}))


def test_finished_conversion_is_not_repeated(
    tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf()
    folder = converted(path)
    monkeypatch.setattr(conversion, "_write_model", lambda *_: pytest.fail("converted again"))
    assert converted(path) == folder


def test_interruption_leaves_nothing_that_is_trusted(
    tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "_write_marker", interrupt)
        with pytest.raises(KeyboardInterrupt):
            converted(path)
    assert left_beside(path) <= {"out.lock"}
    assert is_converted(converted(path), file_sha256(path))


def _make_half_written(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"half")


def test_half_written_folders_are_replaced(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf()
    for name in ("out", "out.tmp-1"):
        _make_half_written(path.parent / name)
    assert not is_converted(path.parent / "out", file_sha256(path))
    folder = converted(path)
    assert is_converted(folder, file_sha256(path))
    assert left_beside(path) == {"out", "out.lock"}
    assert loaded(folder).config.hidden_size == 64


@pytest.mark.parametrize(
    "damage", ["shorter weights", "no tokenizer", "no marker", "other source", "other format"]
)
def test_folder_that_is_no_longer_whole_is_converted_again(
    tiny_gguf: Callable[..., Path], damage: str
) -> None:
    path = tiny_gguf()
    folder = converted(path)
    marker = json.loads((folder / MARKER_NAME).read_text())
    if damage == "shorter weights":
        os.truncate(folder / HALF_FOLDER / "model.safetensors", 100)
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "no marker":
        (folder / MARKER_NAME).unlink()
    else:
        changed = {"source_sha256": "0" * 64} if damage == "other source" else {"format": 0}
        (folder / MARKER_NAME).write_text(json.dumps(marker | changed))
    assert not is_converted(folder, file_sha256(path))
    converted(path)
    assert is_converted(folder, file_sha256(path))


CONVERT = """
import sys, time
from pathlib import Path
from paceline.targets import gguf
from paceline.targets.aliases import file_sha256
write_marker = gguf._write_marker
def announced(folder, sha256):
    print("writing", flush=True)
    sys.stdin.readline()
    write_marker(folder, sha256)
gguf._write_marker = announced
path = Path(sys.argv[1])
def show(line):
    print(line, flush=True)
gguf.convert_gguf(path, path.parent / "out", sha256=file_sha256(path), progress=show)
"""


def start_conversion(path: Path) -> subprocess.Popen[str]:
    """A process that stops before its last step until it is sent a line."""
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def wait_for(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return
    pytest.fail(f"{beginning!r} was not printed, but {lines}")


def test_second_process_waits_and_uses_the_folder_of_the_first(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf()
    first, second = start_conversion(path), None
    try:
        wait_for(first, "writing")
        second = start_conversion(path)
        wait_for(second, "waiting for another process")
        assert not (path.parent / "out").exists()
        first.communicate("\n", timeout=300)
        remaining, _ = second.communicate("\n", timeout=300)
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
    assert (first.returncode, second.returncode) == (0, 0)
    assert "writing" not in remaining
    assert is_converted(path.parent / "out", file_sha256(path))
    assert left_beside(path) == {"out", "out.lock"}


def test_killed_process_leaves_a_folder_that_the_next_one_removes(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf()
    process = start_conversion(path)
    try:
        wait_for(process, "writing")
    finally:
        process.kill()
        process.communicate()
    assert f"out.tmp-{process.pid}" in left_beside(path)
    assert not (path.parent / "out").exists()
    converted(path)
    assert is_converted(path.parent / "out", file_sha256(path))
    assert left_beside(path) == {"out", "out.lock"}
