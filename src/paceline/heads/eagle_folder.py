"""Folders of EAGLE heads: one layer that serves every output vocabulary.

| file | content |
|---|---|
| `config.json` | `head_type` (`eagle3` or `eagle`), `format_version`, `head` (the fields of its configuration) |
| `model.safetensors` | `head.*`; `ranking.*` of a speculated vocabulary; `static_ids` of a static one; `rows.*` where that has rows of its own |
| `provenance.json` | target (`target_fingerprint`), data, settings, `coverage` of the static vocabulary |
| `README.md` | the same for people |

The output layer itself is the target's and is not stored: full, static and speculated vocabularies read the
same rows. Only an output layer that was trained reduced has rows of its own.
"""  # noqa: E501 - the table

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CheckpointError, ConfigError
from paceline.heads.eagle import KINDS, EagleConfig, EagleHead
from paceline.heads.folders import check_files, read_all_tensors, read_json, replaced_folder, write_json
from paceline.vocabularies.speculative import VocabularyRanking

FORMAT_VERSION = 1
_FILES = ("config.json", "model.safetensors", "provenance.json")
_PARTS = ("head", "ranking", "rows", "static_ids")


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """A folder in memory, in fp32.

    Attributes:
        head: the layer, in evaluation mode.
        ranking: of a speculated vocabulary, if one was trained.
        static_ids: int64 [S], ascending, of a static vocabulary, if one was chosen.
        rows: [S, D], its own output layer where it was trained reduced.
        provenance: content of `provenance.json`.
    """

    head: EagleHead
    ranking: VocabularyRanking | None
    static_ids: Tensor | None
    rows: Tensor | None
    provenance: dict[str, Any]

    @property
    def coverage(self) -> float:
        """Share of the target's tokens that the static vocabulary holds."""
        return float(self.provenance.get("coverage", 1.0))


def save_eagle(
    folder: str | Path, loaded: LoadedEagle, readme: str, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write a folder; one that is there already is replaced as a whole.

    Args:
        folder: where to.
        loaded: what it holds.
        readme: text of `README.md`.
        dtype: of the stored parameters.

    Raises:
        CheckpointError: rows and ids do not fit together.
    """
    _check_static(Path(folder), loaded.static_ids, loaded.rows)
    tensors = {f"head.{name}": tensor for name, tensor in loaded.head.state_dict().items()}
    if loaded.ranking is not None:
        tensors |= {f"ranking.{name}": tensor for name, tensor in loaded.ranking.state_dict().items()}
    if loaded.rows is not None:
        tensors["rows.weight"] = loaded.rows
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if loaded.static_ids is not None:
        stored["static_ids"] = loaded.static_ids.to("cpu", torch.int32).contiguous()
    config = loaded.head.config
    with replaced_folder(Path(folder)) as fresh:
        write_json(
            fresh / "config.json",
            {"head_type": config.kind, "format_version": FORMAT_VERSION, "head": asdict(config)},
        )
        save_file(stored, fresh / "model.safetensors")
        write_json(fresh / "provenance.json", loaded.provenance)
        (fresh / "README.md").write_text(readme, encoding="utf-8")


def load_eagle(folder: str | Path) -> LoadedEagle:
    """Read a folder.

    Raises:
        CheckpointError: it is incomplete, damaged, of another kind, or its parts do not fit together.
    """
    folder = Path(folder)
    config = _read_config(folder)
    tensors = read_all_tensors(folder / "model.safetensors")
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise CheckpointError(f"{folder}: unknown tensor {name!r}, parts are {', '.join(_PARTS)}")
        parts[part][rest] = tensor
    with torch.device("meta"):
        head = EagleHead(config)
    _fill(folder, "head", head, parts["head"])
    ranking = None
    if parts["ranking"]:
        width, num_entries = _ranking_shape(folder, parts["ranking"])
        with torch.device("meta"):
            ranking = VocabularyRanking(config.hidden_size, num_entries, width)
        _fill(folder, "ranking", ranking, parts["ranking"])
    static_ids = parts["static_ids"].get("")
    rows = parts["rows"].get("weight")
    static_ids = None if static_ids is None else static_ids.long()
    rows = None if rows is None else rows.float()
    _check_static(folder, static_ids, rows)
    provenance = read_json(folder / "provenance.json")
    coverage = provenance.get("coverage", 1.0)
    if isinstance(coverage, bool) or not isinstance(coverage, int | float) or not 0 < coverage <= 1:
        raise CheckpointError(f"{folder}: coverage is {coverage!r}: it must be above 0 and at most 1")
    return LoadedEagle(head.eval(), ranking, static_ids, rows, provenance)


def _read_config(folder: Path) -> EagleConfig:
    """Shape of the head."""
    check_files(folder, _FILES)
    path = folder / "config.json"
    document = read_json(path)
    if set(document) != {"head_type", "format_version", "head"} or document["head_type"] not in KINDS:
        raise CheckpointError(
            f"{path}: head_type is {document.get('head_type')!r} and keys are {sorted(document)}: it must "
            f"have head_type (one of {', '.join(KINDS)}), format_version and head"
        )
    if document["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version is {document['format_version']!r}, this paceline reads {FORMAT_VERSION}"
        )
    stored, known = document["head"], {field.name for field in fields(EagleConfig)}
    if not isinstance(stored, dict) or set(stored) != known:
        keys = sorted(stored) if isinstance(stored, dict) else stored
        raise CheckpointError(f"{path}: head has {keys}, it must have exactly {sorted(known)}")
    try:
        return EagleConfig(**{**stored, "feature_layers": tuple(stored["feature_layers"])})
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _fill(folder: Path, part: str, module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Every parameter from its tensor, and nothing left over."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        wrong = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
        raise CheckpointError(
            f"{folder}: {part} has "
            + ", ".join(f"{n} {found.get(n, 'missing')}" for n in wrong)
            + "; its shape asks for "
            + ", ".join(f"{n} {wanted.get(n, 'nothing')}" for n in wrong)
        )
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise CheckpointError(f"{folder}: {part} holds values that are not finite: the training diverged")
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)


def _ranking_shape(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Width and entries of a stored ranking."""
    weight = tensors.get("vocabulary.weight")
    if weight is None or weight.dim() != 2:
        raise CheckpointError(f"{folder}: the ranking has no matrix vocabulary.weight")
    return weight.shape[1], weight.shape[0]


def _check_static(folder: Path, static_ids: Tensor | None, rows: Tensor | None) -> None:
    """Rows of its own need ids of their own, and numbers in them."""
    if rows is not None and not bool(rows.isfinite().all()):
        raise CheckpointError(f"{folder}: rows holds values that are not finite: the training diverged")
    if rows is not None and (static_ids is None or len(static_ids) != len(rows)):
        raise CheckpointError(
            f"{folder}: {len(rows)} rows of an output layer and "
            f"{0 if static_ids is None else len(static_ids)} ids: give one id a row"
        )
