"""Converting a GGUF file once into a folder that transformers loads in a second.

The folder holds what `save_pretrained` would write: config.json, generation_config.json, the tokenizer and
model.safetensors. Weights are stored in float32, which reproduces the file's dequantised values bit for bit,
and a second time in bfloat16 under `bf16/`, so that a bfloat16 start maps half the bytes and converts none.
When bfloat16 already holds every value exactly, or the model is so large that float32 is a waste of disk,
bfloat16 is the only copy.

A conversion is written into a temporary folder beside its destination and renamed at the end, its marker file
written last: a folder is trusted only if the marker names the right source and every file has the recorded
size. A lock per destination makes a second process wait and then use the first one's folder.

Read `convert_gguf` first.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError, PacelineError
from paceline.targets.gguf_file import GgufFile
from paceline.targets.gguf_layout import ConversionPlan, PlannedTensor, plan_conversion
from paceline.targets.gguf_tokenizer import eos_token_ids, save_tokenizer

FORMAT_VERSION = 1
MARKER_NAME = "conversion.json"
HALF_FOLDER = "bf16"
_WEIGHTS_NAME = "model.safetensors"
_FULL_PRECISION_LIMIT = 1_000_000_000  # parameters; above it only bfloat16 is stored
_DTYPE_CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def convert_gguf(
    path: Path, destination: Path, *, sha256: str, progress: Callable[[str], None] | None = None
) -> None:
    """Make `destination` the converted folder of a GGUF file, unless it already is.

    Args:
        path: the GGUF file.
        destination: folder to create; its parent is created too.
        sha256: digest of the file, recorded in the marker.
        progress: told in one line what takes time.

    Raises:
        CheckpointError: the file is damaged or cannot be converted; nothing is left behind.
    """
    if is_converted(destination, sha256):
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked(destination, progress):
        if is_converted(destination, sha256):
            return
        _remove_leftovers(destination)
        if progress is not None:
            progress(f"converting {path.name} once")
        temporary = destination.with_name(f"{destination.name}.tmp-{os.getpid()}")
        try:
            temporary.mkdir()
            _write_model(GgufFile.open(path), temporary)
            _write_marker(temporary, sha256)
            temporary.rename(destination)
        except PacelineError:
            raise
        except Exception as error:  # a damaged header can make any step fail, in any library
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(f"cannot convert {path}: {reason[0]}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def is_converted(folder: Path, sha256: str) -> bool:
    """Whether `folder` is a finished conversion of the file with this digest, all its files still whole."""
    try:
        marker = json.loads((folder / MARKER_NAME).read_text(encoding="utf-8"))
        if marker["format"] != FORMAT_VERSION or marker["source_sha256"] != sha256:
            return False
        return all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


@contextmanager
def _locked(destination: Path, progress: Callable[[str], None] | None) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(destination.with_name(f"{destination.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress is not None:
            progress(f"waiting for another process that converts {destination.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(destination: Path) -> None:
    """Delete what a killed conversion left; the lock is held, so nobody is writing there."""
    for leftover in (destination, *destination.parent.glob(f"{destination.name}.tmp-*")):
        if leftover.exists():
            shutil.rmtree(leftover)


def _write_model(file: GgufFile, folder: Path) -> None:
    plan = plan_conversion(file)
    save_tokenizer(file, folder)
    if plan is None:
        _write_through_transformers(file, folder)
    else:
        _write_plan(file, plan, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = eos_token_ids(file.metadata)
    generation = {name: config.get(name) for name in ("bos_token_id", "pad_token_id")}
    generation["eos_token_id"] = ends[0] if len(ends) == 1 else (ends or None)
    _write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    if (folder / HALF_FOLDER).is_dir():
        _write_json(folder / HALF_FOLDER / "config.json", {**config, "dtype": "bfloat16"})
        shutil.copy(folder / "generation_config.json", folder / HALF_FOLDER)


def _write_plan(file: GgufFile, plan: ConversionPlan, folder: Path) -> None:
    num_parameters = sum(tensor.stored.num_rows * tensor.stored.shape[-1] for tensor in plan.tensors)
    half_folder = folder / HALF_FOLDER
    half_folder.mkdir()
    keep_full = num_parameters <= _FULL_PRECISION_LIMIT
    full_path = folder / _WEIGHTS_NAME if keep_full else Path(os.devnull)
    with full_path.open("wb") as full, (half_folder / _WEIGHTS_NAME).open("wb") as half:
        full.write(_safetensors_header(plan.tensors, torch.float32))
        half.write(_safetensors_header(plan.tensors, torch.bfloat16))
        is_exact = True
        for tensor in plan.tensors:
            for values in _values(file, tensor):
                rounded = values.to(torch.bfloat16)
                is_exact = is_exact and torch.equal(rounded.float(), values)
                if keep_full:
                    full.write(memoryview(values.numpy()))  # type: ignore[arg-type]
                half.write(memoryview(rounded.view(torch.int16).numpy()))  # type: ignore[arg-type]
        # Synced, so that not even a power cut leaves a marked folder with empty weights.
        for written in (full, half) if keep_full else (half,):
            written.flush()
            os.fsync(written.fileno())
    dtype = "float32"
    if is_exact or not keep_full:
        (half_folder / _WEIGHTS_NAME).replace(folder / _WEIGHTS_NAME)
        half_folder.rmdir()
        dtype = "bfloat16"
    _write_json(folder / "config.json", {**plan.config, "dtype": dtype})


def _values(file: GgufFile, tensor: PlannedTensor) -> Iterator[Tensor]:
    for chunk in file.float_chunks(tensor.stored, tensor.row_order):
        values = chunk - chunk.dtype.type(tensor.added) if tensor.added else chunk
        yield torch.from_numpy(values if values.flags.writeable else values.copy())


def _safetensors_header(tensors: Seq[PlannedTensor], dtype: torch.dtype) -> bytes:
    """The header of a safetensors file whose tensors follow in this order, so that they can be streamed."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.stored.num_rows * tensor.stored.shape[-1] * dtype.itemsize
        entries[tensor.name] = {
            "dtype": _DTYPE_CODES[dtype], "shape": list(tensor.stored.shape), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_through_transformers(file: GgufFile, folder: Path) -> None:
    """Let transformers dequantise an architecture that `gguf_layout` does not know."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(file.path.parent), gguf_file=file.path.name, dtype=torch.float32
    )
    config = loaded.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    state = loaded.state_dict()
    # Built anew: the loaded object remembers its quantizer, with which it refuses to be saved.
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    if model.num_parameters() <= _FULL_PRECISION_LIMIT:
        model.save_pretrained(str(folder), max_shard_size="100GB")
        half_folder = folder / HALF_FOLDER
    else:
        half_folder = folder
    model.to(torch.bfloat16).save_pretrained(str(half_folder), max_shard_size="100GB")


def _write_marker(folder: Path, sha256: str) -> None:
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    _write_json(folder / MARKER_NAME, {"format": FORMAT_VERSION, "source_sha256": sha256, "files": files})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
