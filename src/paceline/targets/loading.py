"""Loading the model and tokenizer of a resolved target, and telling one target from another.

Weights are mapped from safetensors and converted only when their dtype differs from the one asked for. A key
that the checkpoint lacks is an error here, where transformers would leave random values.

Read `load_model`, then `target_fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import check_known, dtype_from_name
from paceline.errors import CheckpointError, ConfigError
from paceline.targets.gguf import HALF_FOLDER
from paceline.targets.sources import ResolvedTarget

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_TIMEOUT = 10.0  # seconds
_SAMPLED_MATRICES = 24
_SAMPLED_ROWS = 4
_SAMPLED_TOKENS = 512
_PROBE_TEXT = "The 12 quick brown foxes don't jump\n\n  over 3.5 lazy dogs; naïve façade, 東京 \U0001f98a"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A frozen model in evaluation mode and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    device: torch.device


def load_model(
    resolved: ResolvedTarget,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a target, frozen.

    Args:
        resolved: what `resolve_target` found.
        dtype: `fp32`, `bf16` or `fp16`; `auto` is the checkpoint's dtype on a GPU (bf16 for a GGUF file), and
            on a CPU bf16 where it has instructions for it, else fp32.
        device: `cpu`, `cuda` or `mps`; `auto` is cuda, else mps, else cpu.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        CheckpointError: the weights or the tokenizer are missing, incomplete, damaged or cannot be fetched.
        ConfigError: dtype or device is unknown or not on this machine.
    """
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device, resolved)
    location = _weights_location(resolved, chosen_dtype)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _reported(resolved), _quiet():
        if resolved.kind == "hub":
            _check_hub(resolved.location)
        model, report = AutoModelForCausalLM.from_pretrained(
            location,
            dtype=chosen_dtype or "auto",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(resolved.location, trust_remote_code=trust_remote_code)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise CheckpointError(
            f"the checkpoint of {resolved.name!r} lacks {len(missing)} tensors that the model needs, such as "
            f"{missing[0]!r}; is its config.json that of another model?"
        )
    model = model.to(chosen_device).eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, model.dtype, chosen_device)


def choose_device(device: str) -> torch.device:
    """The device behind a choice; ConfigError when this machine has no such device."""
    check_known("device", device, ("auto", "cpu", "cuda", "mps"))
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return torch.device(next(name for name, is_there in available.items() if is_there))
    if not available[device]:
        there = ", ".join(name for name, is_there in available.items() if is_there)
        raise ConfigError(f"device {device!r} is not available here; available: {there}")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device, resolved: ResolvedTarget) -> torch.dtype | None:
    """The dtype behind a choice; None stands for the checkpoint's own."""
    if dtype != "auto":
        return dtype_from_name(dtype)
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    return torch.bfloat16 if resolved.kind == "gguf" else None


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices with instructions of its own."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def _weights_location(resolved: ResolvedTarget, dtype: torch.dtype | None) -> str:
    half = Path(resolved.location) / HALF_FOLDER
    if resolved.kind == "gguf" and dtype == torch.bfloat16 and half.is_dir():
        return str(half)
    return resolved.location


@contextmanager
def _reported(resolved: ResolvedTarget) -> Iterator[None]:
    """Turn what transformers and the weight readers raise into one line about this target."""
    from safetensors import SafetensorError

    try:
        yield
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        ImportError,
        SafetensorError,
        pickle.UnpicklingError,
    ) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if resolved.kind == "hub":
            raise CheckpointError(
                f"cannot load {resolved.name!r} from the Hugging Face Hub: {lines[0]} "
                "(offline? give a local folder, a .gguf file or an alias)"
            ) from error
        raise CheckpointError(f"cannot load the model in {resolved.location}: {lines[0]}") from error


def _check_hub(hub_id: str) -> None:
    """Ask once whether the model is there, unless it is cached: transformers would retry for long."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
        return
    try:
        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT)
    except Exception as error:  # the HTTP client behind it, and with it the class, differs between versions
        raise OSError(str(error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, which would run through a command's output."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def target_fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of a model and its tokenizer, equal for every floating dtype and device it is loaded in.

    It covers the architecture and sizes, evenly spaced vocabulary entries, how a fixed text is tokenised, and
    the signs of evenly spaced rows of evenly spaced weight matrices. Rounding to another floating dtype never
    changes a sign bit, while a fine-tuned, rotated or requantised model changes some of these many thousands.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps([_sizes(model), _vocabulary_sample(tokenizer)], sort_keys=True).encode())
    matrices = sorted((name, weight) for name, weight in model.named_parameters() if weight.dim() == 2)
    for name, weight in _evenly_spaced(matrices, _SAMPLED_MATRICES):
        rows = torch.tensor(_evenly_spaced(range(weight.shape[0]), _SAMPLED_ROWS), device=weight.device)
        signs = torch.signbit(weight.detach()[rows]).cpu()
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(signs.numpy().tobytes())
    return digest.hexdigest()[:16]


def _sizes(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {"model_type": config.model_type, **{name: getattr(config, name, None) for name in names}}


def _vocabulary_sample(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    token_ids = _evenly_spaced(range(len(tokenizer)), _SAMPLED_TOKENS)
    probe = tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"]
    return [len(tokenizer), tokenizer.convert_ids_to_tokens(token_ids), probe]


def _evenly_spaced(items: Any, count: int) -> list[Any]:
    """At most `count` items, the first and the last among them."""
    last = len(items) - 1
    if last < count:
        return list(items)
    return [items[index * last // (count - 1)] for index in range(count)]
