"""What `paceline heads` shows of a head folder, of whatever kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.heads.checkpoint import HEAD_TYPE, load_head
from paceline.heads.eagle import KINDS, EagleConfig
from paceline.heads.eagle_folder import LoadedEagle, load_eagle
from paceline.heads.folders import read_json
from paceline.heads.phrase import PhraseHeadConfig


@dataclass(frozen=True, slots=True)
class HeadSummary:
    """A head folder in figures.

    Attributes:
        path: the folder.
        head_type: `phrase`, `eagle3` or `eagle`.
        config: its shape.
        outputs: in words, what it scores.
        num_parameters: parameters of the network.
        num_bytes: size of the folder's files.
        provenance: content of `provenance.json`.
    """

    path: Path
    head_type: str
    config: PhraseHeadConfig | EagleConfig
    outputs: str
    num_parameters: int
    num_bytes: int
    provenance: dict[str, Any]


def inspect_head(folder: str | Path) -> HeadSummary:
    """Summarise a head folder; it is loaded and thereby checked as a whole.

    Raises:
        CheckpointError: see `load_head` and `load_eagle`.
    """
    folder = Path(folder)
    path = folder / "config.json"
    # A folder without a configuration is reported by the loader, which knows what belongs into one.
    head_type = read_json(path).get("head_type", HEAD_TYPE) if path.is_file() else HEAD_TYPE
    if head_type in KINDS:
        eagle = load_eagle(folder)
        parts = [module for module in (eagle.head, eagle.ranking) if module is not None]
        num_parameters = sum(p.numel() for part in parts for p in part.parameters())
        num_parameters += 0 if eagle.rows is None else eagle.rows.numel()
        return HeadSummary(
            folder, head_type, eagle.head.config, _eagle_outputs(eagle), num_parameters, _size(folder),
            eagle.provenance,
        )  # fmt: skip
    loaded = load_head(folder)
    outputs = f"{len(loaded.vocabulary):,} phrases of at most {loaded.vocabulary.max_words} words"
    if loaded.head.ranking is not None:
        outputs += f", speculated (ranking of width {loaded.head.ranking.width})"
    return HeadSummary(
        folder,
        HEAD_TYPE,
        loaded.config,
        outputs,
        loaded.head.num_parameters,
        _size(folder),
        loaded.provenance,
    )


def _eagle_outputs(loaded: LoadedEagle) -> str:
    """The vocabularies that an EAGLE head can draft with."""
    if loaded.rows is not None:
        return f"static ({len(loaded.rows):,} rows of its own)"
    found = ["full"]
    if loaded.static_ids is not None:
        found.append(f"static ({len(loaded.static_ids):,})")
    if loaded.ranking is not None:
        found.append(f"speculative (ranking of width {loaded.ranking.width})")
    return ", ".join(found)


def _size(folder: Path) -> int:
    """Bytes of the folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
