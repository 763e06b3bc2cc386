"""The tables of lossy verification: speed on fixed work and quality on natural ends, apart."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from paceline.bench.figures import figure
from paceline.bench.lossy_rows import LossyRow

SPEED_COLUMNS = (
    "drafter", "verifier", "nodes", "tokens/s", "x strict", "accepted a round", "x strict",
    "relaxed, % of tokens", "verify, ms a token", "why paths ended, % of rounds",
)  # fmt: skip
QUALITY_COLUMNS = (
    "drafter", "verifier", "log-prob a token", "change", "regret a token", "solved, %", "change",
    "repeated 4-grams, %", "change", "cut, %", "change", "length, x strict", "differing, %",
)  # fmt: skip


def lossy_lines(rows: Seq[LossyRow]) -> list[str]:
    """Both tables for every suite and batch size; no lines without rows."""
    lines: list[str] = []
    for suite, batch_size in dict.fromkeys((row.suite, row.batch_size) for row in rows):
        own = [row for row in rows if (row.suite, row.batch_size) == (suite, batch_size)]
        place = f"{suite}, batch {batch_size}, {own[0].num_prompts} prompts"
        lines += ["", f"## Speed on fixed work: {place}", ""]
        lines += [
            "Every answer has the same number of tokens. Strict verification is measured first and last.",
            "",
        ]
        lines += _table(SPEED_COLUMNS, [_speed_cells(row) for row in own])
        lines += ["", f"## Quality on natural ends: {place}", ""]
        lines += ["Changes are against the first strict run, on the same prompts.", ""]
        lines += _table(QUALITY_COLUMNS, [_quality_cells(row) for row in own if not row.is_repeat])
    return lines


def _table(columns: Seq[str], cells: Seq[Seq[str]]) -> list[str]:
    """A header and its lines."""
    header = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return header + ["| " + " | ".join(row) + " |" for row in cells]


def _drafter(row: LossyRow) -> str:
    """Its name, and its head where one was named."""
    return row.drafter if row.head is None else f"{row.drafter}:{Path(row.head).name}"


def _speed_cells(row: LossyRow) -> list[str]:
    nodes = "" if row.num_speculative_tokens is None else str(row.num_speculative_tokens)
    return [
        _drafter(row),
        f"{row.verifier}, again" if row.is_repeat else row.verifier,
        nodes,
        figure(row.tokens_per_second, 1),
        figure(row.speed_change, 3),
        figure(row.accepted_per_round, 2),
        figure(row.accepted_change, 3),
        figure(row.relaxed_per_token, 1, scale=100),
        figure(row.verify_ms_per_token, 3),
        ", ".join(f"{reason} {100 * share:.0f}" for reason, share in row.refusals.items()),
    ]


def _quality_cells(row: LossyRow) -> list[str]:
    return [
        _drafter(row),
        row.verifier,
        figure(row.log_prob, 3),
        figure(row.log_prob_change, 3, is_signed=True),
        figure(row.regret_per_token, 3),
        figure(row.accuracy, 1, scale=100),
        figure(row.accuracy_change, 1, scale=100, is_signed=True),
        figure(row.repetition, 1, scale=100),
        figure(row.repetition_change, 1, scale=100, is_signed=True),
        figure(row.cut, 0, scale=100),
        figure(row.cut_change, 1, scale=100, is_signed=True),
        figure(row.length_change, 3),
        figure(row.differing, 0, scale=100),
    ]
