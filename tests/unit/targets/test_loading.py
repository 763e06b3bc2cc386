"""Checkpoints of every layout load whole and frozen; a fingerprint tells targets apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError, ConfigError
from paceline.targets import loading
from paceline.targets.loading import choose_dtype, load_model, target_fingerprint
from paceline.targets.sources import ResolvedTarget, resolve_target
from paceline.testing import tiny_model, tiny_tokenizer


def save(folder: Path, architecture: str = "llama", layout: str = "single", **settings: Any) -> Any:
    """Save a tiny model in the given layout and give it back."""
    model = tiny_model(architecture, **settings)
    model.save_pretrained(folder, max_shard_size="20KB" if layout.startswith("sharded") else "1GB")
    tiny_tokenizer().save_pretrained(folder)
    if layout.endswith(".bin"):
        for path in folder.glob("*.safetensors"):
            torch.save(load_file(path), folder / _bin_name(path.name))
            path.unlink()
        for path in folder.glob("*.safetensors.index.json"):
            index = json.loads(path.read_text())
            index["weight_map"] = {key: _bin_name(name) for key, name in index["weight_map"].items()}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
            path.unlink()
    return model


def _bin_name(name: str) -> str:
    return name.replace("model", "pytorch_model").replace(".safetensors", ".bin")


def load(folder: Path, **settings: Any) -> loading.LoadedModel:
    return load_model(resolve_target(str(folder)), **({"dtype": "fp32", "device": "cpu"} | settings))


@pytest.mark.parametrize("layout", ["single", "sharded", "single.bin", "sharded.bin"])
@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_every_layout_loads_the_same_weights(tmp_path: Path, layout: str, architecture: str) -> None:
    model = save(tmp_path, architecture, layout)
    suffix = "bin" if layout.endswith(".bin") else "safetensors"
    assert (len(list(tmp_path.glob(f"*.{suffix}"))) > 1) == layout.startswith("sharded")
    loaded = load(tmp_path).model.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_tied_head_without_a_key_equals_the_embedding(tmp_path: Path) -> None:
    save(tmp_path, "llama-tied")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load(tmp_path).model
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize("key", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_missing_key_is_an_error_that_names_it(tmp_path: Path, key: str) -> None:
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[key]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks 1 tensor.*{key}"):
        load(tmp_path)


def test_missing_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    save(tmp_path, layout="sharded")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["truncated weights", "no tokenizer", "broken config", "other sizes"])
def test_damaged_folder_is_one_line(tmp_path: Path, damage: str) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if damage == "truncated weights":
        content = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    elif damage == "no tokenizer":
        for path in tmp_path.glob("*token*"):
            path.unlink()
    elif damage == "broken config":
        (tmp_path / "config.json").write_text("{")
    else:
        (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_model_is_frozen_and_evaluating_and_says_what_it_is(tmp_path: Path) -> None:
    save(tmp_path)
    loaded = load(tmp_path, dtype="bf16")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.dtype, loaded.device) == (torch.bfloat16, torch.device("cpu"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.tokenizer("the")["input_ids"] == tiny_tokenizer()("the")["input_ids"]


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_unknown_dtype_and_absent_device_are_configuration_errors(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match="bf16"):
        load(tmp_path, dtype="bfloat16")
    with pytest.raises(ConfigError, match="unknown device"):
        load(tmp_path, device="gpu")


def test_absent_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="'cuda' is not available here"):
        loading.choose_device("cuda")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx2": True}, torch.float32),
    ],
)
def test_auto_dtype_on_a_cpu_follows_its_instructions(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    for kind in ("folder", "gguf"):
        assert choose_dtype("auto", torch.device("cpu"), ResolvedTarget("x", "x", kind)) == expected


def test_auto_dtype_on_a_gpu_is_that_of_the_checkpoint() -> None:
    gpu = torch.device("cuda")
    assert choose_dtype("auto", gpu, ResolvedTarget("x", "x", "folder")) is None
    assert choose_dtype("auto", gpu, ResolvedTarget("x", "x", "gguf")) == torch.bfloat16


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_converted_gguf_loads_in_every_dtype(
    tiny_gguf: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    resolved = resolve_target(str(tiny_gguf()), cache_dir=tmp_path / "cache")
    exact = load_file(Path(resolved.location) / "model.safetensors")
    loaded = load_model(resolved, dtype=dtype, device="cpu")
    for name, tensor in loaded.model.state_dict().items():
        if name in exact:
            assert torch.equal(tensor, exact[name].to(loaded.dtype)), name
    assert loaded.model.generation_config.eos_token_id == [0, 2]


def test_bf16_start_of_a_converted_gguf_maps_the_bf16_copy(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    resolved = resolve_target(str(tiny_gguf()), cache_dir=tmp_path / "cache")
    (Path(resolved.location) / "model.safetensors").unlink()
    assert load_model(resolved, dtype="bf16", device="cpu").dtype == torch.bfloat16


def test_offline_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("name or service not known\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(CheckpointError) as caught:
        load_model(resolve_target("nobody/nothing-of-that-name"), dtype="fp32", device="cpu")
    assert "\n" not in str(caught.value)
    assert "'nobody/nothing-of-that-name' from the Hugging Face Hub: name or service not known" in str(
        caught.value
    )


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "gemma3", "gpt2"])
def test_fingerprint_is_the_same_in_every_dtype(tmp_path: Path, architecture: str) -> None:
    save(tmp_path, architecture)
    prints = set()
    for dtype in ("fp32", "bf16", "fp16"):
        loaded = load(tmp_path, dtype=dtype)
        prints.add(target_fingerprint(loaded.model, loaded.tokenizer))
    assert len(prints) == 1
    assert len(prints.pop()) == 16


def test_fingerprint_tells_weights_sizes_and_tokenizers_apart() -> None:
    tokenizer = tiny_tokenizer()
    base = target_fingerprint(tiny_model("llama"), tokenizer)
    assert base == target_fingerprint(tiny_model("llama"), tokenizer)
    others = [target_fingerprint(tiny_model("llama", seed=2), tokenizer)]
    others.append(target_fingerprint(tiny_model("qwen2"), tokenizer))
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.add_(0.05)
    others.append(target_fingerprint(model, tokenizer))
    changed = tiny_tokenizer()
    changed.add_tokens(["the cat"])
    others.append(target_fingerprint(tiny_model("llama"), changed))
    assert len({base, *others}) == 5
