"""Pictures of a run: speed-up per suite, and tokens a round against the width of the draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from paceline.bench.intervals import Interval
from paceline.bench.rows import REFERENCE, ResultRow

# Okabe and Ito's colours: told apart by everyone.
_COLOURS = ("#999999", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#E69F00")


def draw_plots(rows: Seq[ResultRow], folder: Path) -> list[Path]:
    """Draw what the rows allow; returns the files written."""
    paths = []
    for batch_size in dict.fromkeys(row.batch_size for row in rows):
        chosen = [row for row in rows if row.batch_size == batch_size]
        ending = "" if len({row.batch_size for row in rows}) == 1 else f"-batch-{batch_size}"
        paths += _speed_up_plot(chosen, folder / f"speedup{ending}.png")
        paths += _width_plot(chosen, folder / f"acceptance{ending}.png")
    return paths


def _speed_up_plot(rows: Seq[ResultRow], path: Path) -> list[Path]:
    """Grouped bars: one group per suite, one bar per arm, with intervals."""
    against_reference = [row for row in rows if row.speedup_vs_hf_generate is not None]
    base = "Hugging Face generate()" if against_reference else "decoding without drafts"
    chosen = [
        (row, figure)
        for row in rows
        if row.drafter != REFERENCE
        and (figure := row.speedup_vs_hf_generate if against_reference else row.speedup_vs_none) is not None
    ]
    if not chosen:
        return []
    suites = list(dict.fromkeys(row.suite for row, _ in chosen))
    labels = list(dict.fromkeys(_label(row) for row, _ in chosen))
    figure, axes = _new_figure(1.6 + 0.55 * len(suites) * (len(labels) + 1))
    bar_width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        own = [(suites.index(row.suite), value) for row, value in chosen if _label(row) == label]
        places = [place + (number - (len(labels) - 1) / 2) * bar_width for place, _ in own]
        values = [value for _, value in own]
        bars = axes.bar(
            places,
            [value.value for value in values],
            bar_width * 0.92,
            yerr=_errors(values),
            label=label,
            color=_COLOURS[number % len(_COLOURS)],
            capsize=2,
            error_kw={"linewidth": 0.9},
        )
        axes.bar_label(bars, [f"{value.value:.2f}" for value in values], fontsize=8, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(suites)), suites)
    axes.set_ylabel(f"speed-up over {base}")
    return _save(figure, axes, path)


def _width_plot(rows: Seq[ResultRow], path: Path) -> list[Path]:
    """Tokens a round against drafted nodes, one line per suite and drafter; needs two widths."""
    lines: dict[tuple[str, str, str], list[tuple[int, Interval]]] = {}
    for row in rows:
        if isinstance(row.num_speculative_tokens, int) and row.mean_acceptance_length is not None:
            lines.setdefault((row.suite, row.drafter, row.verifier), []).append(
                (row.num_speculative_tokens, row.mean_acceptance_length)
            )
    lines = {
        name: sorted(points, key=lambda point: point[0]) for name, points in lines.items() if len(points) > 1
    }
    if not lines:
        return []
    figure, axes = _new_figure(6.0)
    for number, ((suite, drafter, verifier), points) in enumerate(lines.items()):
        values = [value for _, value in points]
        axes.errorbar(
            [width for width, _ in points],
            [value.value for value in values],
            yerr=_errors(values),
            label=f"{suite}, {drafter}" + ("" if verifier == "greedy" else f" ({verifier})"),
            color=_COLOURS[(number + 1) % len(_COLOURS)],
            marker="o",
            markersize=4,
            capsize=2,
        )
    axes.set_xlabel("drafted nodes a round")
    axes.set_ylabel("tokens a round")
    return _save(figure, axes, path)


def _label(row: ResultRow) -> str:
    """Name of an arm in a legend."""
    parts = [row.drafter if row.head is None else f"{row.drafter} ({Path(row.head).name})"]
    if row.num_speculative_tokens is not None:
        parts.append(f"{row.num_speculative_tokens} nodes")
    if row.verifier != "greedy":
        parts.append(row.verifier)
    return ", ".join(parts)


def _errors(values: Seq[Interval]) -> list[list[float]]:
    """Lengths of the error bars, below and above; a draw can miss the point estimate on one side."""
    return [
        [max(0.0, value.value - value.low) for value in values],
        [max(0.0, value.high - value.value) for value in values],
    ]


def _new_figure(width: float) -> tuple[Any, Any]:
    """A figure that needs no display."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(5.0, min(width, 14.0)), 3.8), dpi=150, layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> list[Path]:
    """Write the picture and free it."""
    from matplotlib import pyplot

    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)
    pyplot.close(figure)
    return [path]
