"""Writes `results.json`, `report.md` and the plots of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.arms import ArmName
from paceline.bench.figures import figure
from paceline.bench.lossy_report import lossy_lines
from paceline.bench.lossy_rows import LossyRow
from paceline.bench.near_ties import NOISE_PERCENTILE, NOISE_WIDTH, Difference
from paceline.bench.plots import draw_plots
from paceline.bench.roofline import Roofline
from paceline.bench.rows import ResultRow
from paceline.bench.verifier_specs import VerifierSpec

TABLE_COLUMNS = (
    "drafter",
    "verifier",
    "nodes",
    "tokens/s",
    "x HF generate",
    "x plain",
    "tokens a round",
    "accepted a round",
    "draft ms",
    "round ms",
    "width",
    "identical",
    "as plain",
)


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """All results of a run.

    Attributes:
        metadata: command, machine, versions, settings, prompt ids.
        rows: figures.
        differences: where answers left their reference.
        rounding_noise: largest gap that rounding explains on this model; None when it was not needed.
        roofline: forwards against the floor that memory sets; None when not asked for.
        lossy: what lossy verifiers bring and cost; empty without any.
    """

    metadata: Mapping[str, Any]
    rows: Seq[ResultRow]
    differences: Seq[Difference]
    rounding_noise: float | None = None
    roofline: Roofline | None = None
    lossy: Seq[LossyRow] = ()

    def write(self, folder: Path) -> list[Path]:
        """Write all files; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        results, report = folder / "results.json", folder / "report.md"
        plots = draw_plots(self.rows, folder)
        results.write_text(json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        report.write_text(self.as_markdown(plots), encoding="utf-8")
        return [results, report, *plots]

    def as_dict(self) -> dict[str, Any]:
        """Content of `results.json`."""
        return {
            **self.metadata,
            "rows": [row.as_dict() for row in self.rows],
            "rounding_noise": self.rounding_noise,
            "roofline": None if self.roofline is None else self.roofline.as_dict(),
            "lossy": [row.as_dict() for row in self.lossy],
            "differences": [_finite(difference.as_dict()) for difference in self.differences],
        }

    def as_markdown(self, plots: Seq[Path] = ()) -> str:
        """Content of `report.md`."""
        machine, settings = self.metadata["machine"], self.metadata["settings"]
        lines = [
            "# Benchmark",
            "",
            f"`{self.metadata['command']}`",
            "",
            f"{self.metadata['date']}, {machine['cpu']}, {machine['threads']} threads, "
            f"dtype {settings['dtype']}, target {settings['target']}, "
            f"at most {settings['max_new_tokens']} tokens.",
            "Brackets hold 95 % intervals (paired bootstrap over prompts).",
        ]
        for suite, batch_size in dict.fromkeys((row.suite, row.batch_size) for row in self.rows):
            rows = [row for row in self.rows if (row.suite, row.batch_size) == (suite, batch_size)]
            lines += ["", f"## {suite}, batch {batch_size}, {rows[0].num_prompts} prompts", ""]
            lines += markdown_table(rows)
        lines += lossy_lines(self.lossy)
        lines += self.time_lines()
        lines += self.peer_lines()
        lines += self.roofline_lines()
        for plot in plots:
            lines += ["", f"![{plot.stem}]({plot.name})"]
        return "\n".join([*lines, *self._difference_lines()]) + "\n"

    def time_lines(self) -> list[str]:
        """Where the time of a round goes."""
        rows = [row for row in self.rows if row.round_ms is not None]
        if not rows:
            return []
        return [
            "",
            "## The time of a round, in milliseconds",
            "",
            "Means over all rounds, those that read a prompt included.",
            "",
            "| suite | batch | drafter | verifier | nodes | draft | forward | verify | commit | host |",
            "|" + "---|" * 10,
            *(
                f"| {row.suite} | {row.batch_size} | {' | '.join(table_cells(row)[:3])} | "
                f"{figure(row.draft_ms_per_round, 2)} | {figure(row.forward_ms_per_round, 2)} | "
                f"{figure(row.verify_ms_per_round, 2)} | {figure(row.commit_ms_per_round, 2)} | "
                f"{figure(row.host_ms_per_round, 2)} |"
                for row in rows
            ),
        ]

    def peer_lines(self) -> list[str]:
        """What the rivals are, and how many of their answers have the reference's ids."""
        peers: Mapping[str, Mapping[str, str | int]] = self.metadata["settings"].get("peers", {})
        if not peers:
            return []
        return [
            "",
            "## Rivals",
            "",
            "Greedy, with arithmetic of their own: where their answers differ is counted and not judged.",
            "",
            "| suite | rival | software | weights | threads | identical answers |",
            "|---|---|---|---|---|---|",
            *(
                f"| {row.suite} | {row.drafter} | {peer['software']} | {peer['weights']} | "
                f"{peer['threads']} | {_num_identical(row)} |"
                for row in self.rows
                if (peer := peers.get(str(ArmName(row.drafter, row.verifier)))) is not None
            ),
        ]

    def roofline_lines(self) -> list[str]:
        """Forwards against the floor that memory sets."""
        floor = self.roofline
        if floor is None:
            return []
        return [
            "",
            "## Roofline",
            "",
            f"{floor.bandwidth / 1e9:.1f} GB/s measured; a forward reads {floor.weight_bytes / 1e6:.0f} MB "
            f"of weights and {floor.cache_bytes_per_token / 1e3:.1f} kB for every cached token.",
            "",
            "| suite | arm | batch | MB a round | floor, ms | forward, ms | share |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {row.suite} | {row.arm} | {row.batch_size} | {row.bytes_per_round / 1e6:.0f} | "
                f"{row.floor_ms:.1f} | {row.forward_ms:.1f} | {row.share:.0%} |"
                for row in floor.rows
            ),
        ]

    def _difference_lines(self) -> list[str]:
        """Where answers differ from their reference, and by how little."""
        judged = [row for row in self.rows if not VerifierSpec.read(row.verifier).is_lossy]
        if all(row.identical_fraction is None for row in judged):
            return ["", "No reference was measured, so answers were compared with nothing."]
        if not self.differences:
            excused = ["rivals"] if self.metadata["settings"].get("peers") else []
            excused += ["lossy verifiers"] if len(judged) < len(self.rows) else []
            but = f" but those of {' and '.join(excused)}" if excused else ""
            return ["", f"All answers{but} are identical to their reference."]
        lines = [
            "",
            "## Differences",
            "",
            "First different token of each answer that is not identical. `gap`: logits between the likeliest",
            "token and the less likely of the two chosen ones, by the reference after the common prefix.",
            self._noise_line(),
            "",
            "| suite | arm | prompt | turn | position | gap |",
            "|---|---|---|---|---|---|",
        ]
        return lines + [
            f"| {d.suite} | {d.arm} | {d.prompt_id} | {d.turn + 1} | {d.position} | {d.gap:.3f} |"
            for d in self.differences
        ]

    def _noise_line(self) -> str:
        """How many of the greedy answers part at a near-tie."""
        if self.rounding_noise is None:
            return ""
        greedy = [d for d in self.differences if d.reference.endswith("/greedy")]
        num_near_ties = sum(d.gap <= self.rounding_noise for d in greedy)
        return (
            f"Rounding alone moves this model's logits by up to {self.rounding_noise:.3f} (reading one token "
            f"or {NOISE_WIDTH} at a time, percentile {NOISE_PERCENTILE}): {num_near_ties} of {len(greedy)} "
            "greedy differences are such near-ties."
        )


def markdown_table(rows: Seq[ResultRow]) -> list[str]:
    """One line per row, a header above."""
    lines = ["| " + " | ".join(TABLE_COLUMNS) + " |", "|" + "---|" * len(TABLE_COLUMNS)]
    return lines + ["| " + " | ".join(table_cells(row)) + " |" for row in rows]


def table_cells(row: ResultRow) -> list[str]:
    """The cells of one row, as text."""
    return [
        row.drafter if row.head is None else f"{row.drafter}:{Path(row.head).name}",
        row.verifier,
        "" if row.num_speculative_tokens is None else str(row.num_speculative_tokens),
        figure(row.tokens_per_second, 1),
        figure(row.speedup_vs_hf_generate, 2),
        figure(row.speedup_vs_none, 2),
        figure(row.mean_acceptance_length, 2),
        figure(row.accepted_per_round, 2),
        figure(row.draft_ms_per_round, 1),
        figure(row.round_ms, 1),
        figure(row.mean_forward_width, 1),
        "" if row.identical_fraction is None else f"{100 * row.identical_fraction:.0f} %",
        "" if row.identical_to_none is None else f"{100 * row.identical_to_none:.0f} %",
    ]


def _num_identical(row: ResultRow) -> str:
    """Answers with the reference's ids, of all."""
    if row.identical_fraction is None:
        return f"compared with nothing ({row.num_prompts})"
    return f"{round(row.identical_fraction * row.num_prompts)} of {row.num_prompts}"


def _finite(stored: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: an infinite gap (one answer ended early) becomes null."""
    return {name: None if value == float("inf") else value for name, value in stored.items()}
