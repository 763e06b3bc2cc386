"""`README.md` of a trained EAGLE head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_eagle_readme(provenance: Mapping[str, Any]) -> str:
    """Content of the head folder's `README.md`.

    Args:
        provenance: what `build_provenance` made, and `coverage`.
    """
    stages = provenance["stages"]
    fit, vocabulary, evaluation = stages["fit"], stages["vocabulary"], stages["evaluation"]
    target = provenance["target"]
    rows = "\n".join(
        f"| {name} | {figures['num_speculative_tokens']} | {figures['mean_acceptance_length']:.2f} |"
        for name, figures in evaluation.items()
        if isinstance(figures, Mapping)
    )
    measured = f"""
In the engine, on {evaluation["num_prompts"]} held-out prompts:

| output vocabulary | drafted nodes | tokens per round |
|---|---|---|
{rows}
""" if rows else ""  # fmt: skip
    steps = ", ".join(f"{share:.1%}" for share in fit["history"][-1]["agreement"])
    return f"""# EAGLE-3 head for {target}

A draft head for `paceline`: one decoder layer that goes on from the frozen target's features. It changes how
fast the target answers, never what it answers.

    paceline generate "..." --target {target} --drafter eagle3:static --head FOLDER

It was trained on {fit["num_learned_tokens"]:,} tokens that the target wrote itself. On held-out answers its
guess is the target's own token in so many cases, by step of a draft: {steps}. The static vocabulary holds
{vocabulary["num_entries"]:,} tokens, {provenance["coverage"]:.2%} of what the target says.
{measured}
Made by:

    {provenance["command"]}

`provenance.json` has the seed, digests of the prompt files, library versions and the figures of every stage.
"""
