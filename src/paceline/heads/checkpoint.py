"""Head folders: a trained head, its phrases, and where it comes from.

| file | content |
|---|---|
| `config.json` | `head_type`, `format_version`, `head` (the fields of the head's configuration) |
| `model.safetensors` | every parameter of the head, and nothing else |
| `phrases.json` | its output vocabulary (`paceline.vocabularies.phrase_file`) |
| `provenance.json` | target (`target_fingerprint`), data and settings it was trained with |
| `README.md` | the same for people |

A folder is written beside its final place and moved there when it is complete. Loading is strict: anything
missing, superfluous or of the wrong shape is a CheckpointError, since a head with random rows drafts nonsense
silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.errors import CheckpointError, ConfigError
from paceline.heads.folders import check_files, read_json, read_tensors, replaced_folder, write_json
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.vocabularies.phrases import PhraseVocabulary

FORMAT_VERSION = 3
# Fields that an older format did not have; their defaults describe its heads.
_ADDED_FIELDS = {
    1: frozenset({"chain_entries", "ranking_width"}),
    2: frozenset({"ranking_width"}),
    3: frozenset(),
}
HEAD_TYPE = "phrase"
PRETRAINED = Path(__file__).parent.parent / "pretrained"
_FILES = ("config.json", "model.safetensors", "phrases.json", "provenance.json")


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head folder in memory.

    Attributes:
        head: the network, in fp32 and in evaluation mode.
        vocabulary: what its outputs mean.
        config: its shape.
        provenance: content of `provenance.json`.
    """

    head: PhraseHead
    vocabulary: PhraseVocabulary
    config: PhraseHeadConfig
    provenance: dict[str, Any]


def save_head(
    folder: str | Path,
    head: PhraseHead,
    vocabulary: PhraseVocabulary,
    provenance: Mapping[str, Any],
    readme: str,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a head folder; one that is there already is replaced as a whole.

    Args:
        folder: where to.
        head: the trained network.
        vocabulary: one phrase per output of the head.
        provenance: JSON values; `target_fingerprint` lets a head be matched with its target.
        readme: text of `README.md`.
        dtype: of the stored parameters.

    Raises:
        CheckpointError: head and vocabulary do not fit together.
    """
    folder = Path(folder)
    if len(vocabulary) != head.config.num_entries:
        raise CheckpointError(
            f"{len(vocabulary)} phrases for a head with {head.config.num_entries} outputs: give one each"
        )
    with replaced_folder(folder) as fresh:
        document = {"head_type": HEAD_TYPE, "format_version": FORMAT_VERSION, "head": asdict(head.config)}
        write_json(fresh / "config.json", document)
        tensors = {
            name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.state_dict().items()
        }
        save_file(tensors, fresh / "model.safetensors")
        vocabulary.save(fresh / "phrases.json")
        write_json(fresh / "provenance.json", dict(provenance))
        (fresh / "README.md").write_text(readme, encoding="utf-8")


def load_head(folder: str | Path) -> LoadedHead:
    """Read a head folder.

    Raises:
        CheckpointError: it is incomplete, damaged, of another kind, or its parts do not fit together.
    """
    folder = Path(folder)
    config, provenance = _read_config(folder), read_json(folder / "provenance.json")
    vocabulary = PhraseVocabulary.load(folder / "phrases.json")
    if len(vocabulary) != config.num_entries:
        raise CheckpointError(
            f"{folder}: phrases.json has {len(vocabulary)} entries, the head has {config.num_entries}"
        )
    with torch.device("meta"):
        head = PhraseHead(config)
    wanted = {name: tuple(parameter.shape) for name, parameter in head.state_dict().items()}
    head.load_state_dict(read_tensors(folder / "model.safetensors", wanted), assign=True)
    return LoadedHead(head.eval(), vocabulary, config, provenance)


def pretrained_heads() -> list[Path]:
    """Folders of the heads that are shipped with the package: `pretrained/<target>/<head>`, sorted."""
    return sorted(file.parent for file in PRETRAINED.glob("*/*/config.json"))


def default_head(target: str, head_type: str = HEAD_TYPE) -> Path | None:
    """The shipped head for a target, if there is one; the first by name when there are several.

    Args:
        target: a target's fingerprint or its folder name below `pretrained/`.
        head_type: kind of head wanted.
    """
    for folder in pretrained_heads():
        if read_json(folder / "config.json").get("head_type") != head_type:
            continue
        if target in (folder.parent.name, read_json(folder / "provenance.json").get("target_fingerprint")):
            return folder
    return None


def _read_config(folder: Path) -> PhraseHeadConfig:
    """Check that the folder is a head that this version reads, and return its shape."""
    check_files(folder, _FILES)
    path = folder / "config.json"
    document = read_json(path)
    if set(document) != {"head_type", "format_version", "head"}:
        raise CheckpointError(
            f"{path}: has keys {sorted(document)}, it must have head_type, format_version and head"
        )
    if document["head_type"] != HEAD_TYPE:
        raise CheckpointError(f"{path}: head_type is {document['head_type']!r}, it must be {HEAD_TYPE!r}")
    version = document["format_version"]
    if not isinstance(version, int) or version not in _ADDED_FIELDS:
        raise CheckpointError(
            f"{path}: format_version is {version!r}, this paceline reads {sorted(_ADDED_FIELDS)}"
        )
    known = {field.name for field in fields(PhraseHeadConfig)} - _ADDED_FIELDS[version]
    stored = document["head"]
    if not isinstance(stored, dict) or set(stored) != known:
        keys = sorted(stored) if isinstance(stored, dict) else stored
        raise CheckpointError(f"{path}: head has {keys}, it must have exactly {sorted(known)}")
    try:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return PhraseHeadConfig(**values)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
