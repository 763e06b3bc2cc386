"""Writes what a calibration found: `calibration.json` and a picture of the distribution."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.calibration import Calibration, Suggestion
from paceline.bench.limit_trials import Trial

PERCENTILES = (5, 10, 25, 50, 75, 90)


def summary(calibration: Calibration) -> dict[str, Any]:
    """Counts and percentiles, ready for JSON."""
    return {
        "num_answers": calibration.num_answers,
        "num_tokens": calibration.num_tokens,
        "num_rounds": calibration.num_rounds,
        "reasons": dict(sorted(calibration.reasons.items())),
        "num_rejections": len(calibration.regrets),
        "num_ties": int((calibration.regrets == 0).sum()),
        "regret_percentiles": _percentiles(calibration.regrets),
        "regret_per_value_percentiles": _percentiles(calibration.ratios),
    }


def write_calibration(
    folder: Path,
    calibration: Calibration,
    suggestions: Mapping[str, Suggestion],
    run: Mapping[str, Any],
    trials: Seq[Trial] = (),
) -> list[Path]:
    """Write both files; returns their paths.

    Args:
        folder: created when needed.
        calibration: what was found.
        suggestions: by the wish that they answer.
        run: command, target, drafter and machine, noted in the file.
        trials: limits that prompts were decoded with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        **run,
        **summary(calibration),
        "suggestions": {name: asdict(suggestion) for name, suggestion in suggestions.items()},
        "trials": [trial.as_dict() for trial in trials],
        "regrets": calibration.regrets.tolist(),
        "values": calibration.values.tolist(),
    }
    path = folder / "calibration.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return [path, _draw(folder / "regret.png", calibration, suggestions)]


def _percentiles(amounts: np.ndarray[Any, Any]) -> dict[str, float]:
    return {str(p): float(np.percentile(amounts, p)) for p in PERCENTILES}


def _draw(path: Path, calibration: Calibration, suggestions: Mapping[str, Suggestion]) -> Path:
    """Share of rejections up to each regret over value, with the suggested gates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    ratios = np.sort(calibration.ratios)
    axes.step(ratios, np.arange(1, len(ratios) + 1) / len(ratios), where="post", color="#0072B2")
    for number, (name, suggestion) in enumerate(suggestions.items()):
        gate = suggestion.max_regret_per_value
        axes.axvline(gate, color="#D55E00", linestyle=("--", ":")[number % 2], label=f"{name}: {gate:.3f}")
    axes.set_xlim(0, float(np.percentile(ratios, 95)) or 1.0)
    axes.set_ylim(0, 1)
    axes.set_xlabel("regret at the first rejection / suffix value, logits")
    axes.set_ylabel("share of rejections")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    return path
