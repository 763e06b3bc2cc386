"""Where a head comes from: everything needed to judge it and to make it again."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.training.options import TrainingOptions

_LIBRARIES = ("paceline", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "numpy")


def build_provenance(
    options: TrainingOptions,
    stages: Mapping[str, Mapping[str, Any]],
    *,
    target_fingerprint: str,
    target_dtype: str,
    data_digests: Mapping[str, str],
) -> dict[str, Any]:
    """Content of `provenance.json`.

    Args:
        options: of the run.
        stages: what each stage reported.
        target_fingerprint: of the target that answered.
        target_dtype: in which it did.
        data_digests: file -> SHA-256 of the prompt files.
    """
    return {
        "command": command_line(options),
        "seed": options.seed,
        "target": _public_name(options.target),
        "target_fingerprint": target_fingerprint,
        "target_dtype": target_dtype,
        "data": {Path(name).name: digest for name, digest in data_digests.items()},
        "num_tokens": stages["answers"]["num_tokens"],
        "stages": {name: dict(figures) for name, figures in stages.items()},
        "libraries": library_versions(),
        "python": platform.python_version(),
        "revision": git_revision(),
    }


def command_line(options: TrainingOptions) -> str:
    """The command that makes this head; folders are cut to their names, so it names no private path."""
    words = ["paceline", "train", options.command]
    defaults = type(options)(out=options.out)
    for name, value in options.as_dict().items():
        if name in ("work", "stop_after") or (name != "out" and value == defaults.as_dict()[name]):
            continue
        flag = f"--{name.replace('_', '-')}"
        if name in ("data", "exclude", "static_corpus"):
            for location in value:
                words += [flag, _public_name(location)]
        elif name in ("out", "init", "head", "target"):
            words += [flag, _public_name(value)]
        elif name in ("feature_layers", "inputs"):
            words += [flag, ",".join(map(str, value))]
        elif isinstance(value, bool):
            words.append(flag)
        else:
            words += [flag, str(value)]
    return " ".join(words)


def _public_name(location: str) -> str:
    """A Hub name as it is; of a path its last part."""
    path = Path(location)
    return path.name if path.is_absolute() or path.exists() else location


def library_versions() -> dict[str, str]:
    """Versions of the libraries that matter."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Commit of the checkout that this package runs from; None outside one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def build_readme(
    provenance: Mapping[str, Any], tokens_per_round: Mapping[Any, float], num_held_out_tokens: int
) -> str:
    """Content of the head folder's `README.md`.

    Args:
        provenance: what `build_provenance` made.
        tokens_per_round: on held-out answers, by number of drafted nodes.
        num_held_out_tokens: of those answers.
    """
    sources = provenance["stages"]["answers"].get("tokens_by_source", {})
    rows = "\n".join(f"| {width} | {value:.2f} |" for width, value in tokens_per_round.items())
    source_rows = "\n".join(f"| {name} | {count:,} |" for name, count in sources.items())
    return f"""# Phrase head for {provenance["target"]}

A draft head for `paceline`: it reads the frozen target's hidden state and proposes whole phrases. It changes
how fast the target answers, never what it answers.

    paceline generate "..." --target {provenance["target"]} --head FOLDER

It was trained on {provenance["num_tokens"]:,} tokens that the target wrote itself:

| prompts | tokens of answers |
|---|---|
{source_rows}

On answers to held-out prompts ({num_held_out_tokens:,} tokens):

| drafted nodes | tokens per round |
|---|---|
{rows}

Made by:

    {provenance["command"]}

`provenance.json` has the seed, digests of the prompt files, library versions and the figures of every stage.
"""
