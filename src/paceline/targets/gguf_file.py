"""Reading a GGUF file: its metadata, its list of tensors, and float32 values of one tensor at a time.

GGUF is the single-file format of llama.cpp: a header of key-value pairs (vocabulary and merges included), a
table of tensors, then the aligned tensor bytes. The `gguf` package reads the header element by element, which
takes seconds for a large vocabulary; this reader takes a tenth of one and leaves only the arithmetic of
dequantising to that package. Every damaged file ends in one `CheckpointError`.

Read `GgufFile.open` first; `_HeaderCursor` is the binary grammar.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, UnsupportedFeatureError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Numbered value types of the header: integers of 8 to 32 bits, float32, bool, then the 64-bit ones.
_SCALARS: Mapping[int, np.dtype[Any]] = {
    number: np.dtype(code)
    for number, code in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
        6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
_CHUNK_ELEMENTS = 1 << 21  # dequantised at once: bounds the memory of a conversion whatever the tensor's size


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies in the file.

    Attributes:
        shape: outermost dimension first, as torch and numpy write it.
        quantization: name of the ggml storage type, `Q4_1` for example.
        start: first byte, from the start of the file.
        row_bytes: stored bytes of one row (the innermost dimension).
    """

    name: str
    shape: tuple[int, ...]
    quantization: str
    start: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of the tensor seen as a matrix."""
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        """Stored size."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened GGUF file. Values are read from the mapped file when asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    mapped: mmap.mmap

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header of a GGUF file.

        Raises:
            CheckpointError: not a GGUF file, truncated, or damaged.
            UnsupportedFeatureError: one part of a split file, or a storage type that is not known.
        """
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"cannot read {path}: {error}") from None
        cursor = _HeaderCursor(mapped)
        try:
            metadata, tensors = cursor.read_header()
        except (struct.error, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is not a whole GGUF file: its header is damaged ({error})"
            ) from None
        if metadata.get("split.count", 0) > 1:
            raise UnsupportedFeatureError(
                f"{path} is one part of a GGUF split into {metadata['split.count']}: join them first"
            )
        end = max((tensor.start + tensor.num_bytes for tensor in tensors.values()), default=0)
        if end > len(mapped):
            raise CheckpointError(f"{path} is truncated: {len(mapped)} bytes, its tensors end at byte {end}")
        return cls(path, metadata, tensors, mapped)

    def float_chunks(
        self, tensor: GgufTensor, row_order: NDArray[np.int64] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """The values of a tensor as float32, a block of rows [rows, columns] at a time.

        Args:
            tensor: one of `tensors`.
            row_order: for each row given out, the stored row to take; stored order when None.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[tensor.quantization]
        stored = np.frombuffer(self.mapped, np.uint8, tensor.num_bytes, tensor.start)
        rows = stored.reshape(tensor.num_rows, tensor.row_bytes)
        step = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
        for first in range(0, tensor.num_rows, step):
            block = rows[first : first + step] if row_order is None else rows[row_order[first : first + step]]
            try:
                yield np.ascontiguousarray(dequantize(block, kind), dtype=np.float32)
            except NotImplementedError:
                raise UnsupportedFeatureError(
                    f"{self.path}: tensor {tensor.name!r} is stored as {tensor.quantization}, which cannot "
                    "be dequantised here; use a file in F16, BF16, Q8_0 or a Q4/Q5/Q6 type"
                ) from None


class _HeaderCursor:
    """Walks over the header; every read past the end of the file raises `struct.error` or ValueError."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._at = 0

    def read_header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._mapped[:4] != _MAGIC:
            raise ValueError(f"it starts with {self._mapped[:4]!r}, not {_MAGIC!r}")
        self._at = 4
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"format version {version}, known are {_VERSIONS}")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        data_start = math.ceil(self._at / alignment) * alignment
        return metadata, {entry[0]: _placed(*entry, data_start=data_start) for entry in entries}

    def _number(self, code: str) -> int:
        value = struct.unpack_from(code, self._mapped, self._at)[0]
        self._at += struct.calcsize(code)
        return int(value)

    def _bytes(self, count: int) -> bytes:
        if self._at + count > len(self._mapped):
            raise ValueError(f"{count} bytes wanted at byte {self._at}, the file has {len(self._mapped)}")
        taken = self._mapped[self._at : self._at + count]
        self._at += count
        return taken

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element_kind, count = self._number("<I"), self._number("<Q")
            if element_kind in _SCALARS:
                dtype = _SCALARS[element_kind]
                return np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
            return [self._value(element_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} at byte {self._at}")
        dtype = _SCALARS[kind]
        return np.frombuffer(self._bytes(dtype.itemsize), dtype)[0].item()

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= 4:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        # stored innermost first
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int, *, data_start: int) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    quantization = GGMLQuantizationType(kind)
    block_len, block_bytes = GGML_QUANT_SIZES[quantization]
    if shape[-1] == 0 or shape[-1] % block_len:
        raise ValueError(f"tensor {name!r} has rows of {shape[-1]} values, not blocks of {block_len}")
    return GgufTensor(
        name, shape, quantization.name, data_start + offset, shape[-1] // block_len * block_bytes
    )
