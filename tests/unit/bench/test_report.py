"""Files that a run leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.bench.arms import ArmName
from paceline.bench.intervals import Interval
from paceline.bench.near_ties import Difference
from paceline.bench.report import TABLE_COLUMNS, BenchmarkReport, markdown_table, table_cells
from paceline.bench.rows import ResultRow

PNG = b"\x89PNG\r\n\x1a\n"
METADATA = {
    "command": "paceline bench",
    "date": "today",
    "machine": {"cpu": "a processor", "threads": 2},
    "settings": {"dtype": "fp32", "target": "tiny", "max_new_tokens": 8},
}


def row(drafter="phrase", width=8, suite="builtin", **changes):
    baseline = drafter.startswith("hf_")
    figure = Interval(2.0, 1.5, 2.5)
    values = {
        "suite": suite,
        "drafter": drafter,
        "verifier": "greedy",
        "batch_size": 1,
        "num_speculative_tokens": None if baseline or drafter == "none" else width,
        "head": None,
        "num_prompts": 3,
        "num_output_tokens": 24,
        "tokens_per_second": figure,
        "speedup_vs_hf_generate": figure,
        "speedup_vs_none": figure,
        "mean_acceptance_length": None if baseline else figure,
        "accepted_per_round": None if baseline else figure,
        "draft_ms_per_round": None if baseline else 1.25,
        "forward_ms_per_round": None if baseline else 55.5,
        "verify_ms_per_round": None if baseline else 0.75,
        "commit_ms_per_round": None if baseline else 0.5,
        "host_ms_per_round": None if baseline else 0.25,
        "round_ms": None if baseline else 60.5,
        "mean_forward_width": None if baseline else 8.5,
        "identical_fraction": None if baseline else 0.5,
    }
    return ResultRow(**(values | changes))


DIFFERENCE = Difference(
    "builtin", 1, str(ArmName("phrase", "greedy", 8)), "hf_generate/greedy", "p1", 0, 4, 7, 8, 0.1, 0.125
)


def test_results_hold_the_rows_and_what_is_needed_to_repeat_them(tmp_path):
    BenchmarkReport(METADATA, [row()], [DIFFERENCE]).write(tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["command"] == "paceline bench"
    assert stored["rows"][0]["tokens_per_second"] == {"value": 2.0, "low": 1.5, "high": 2.5}
    assert stored["differences"][0]["gap"] == 0.125


def test_the_time_of_a_round_has_a_table_of_its_own():
    text = BenchmarkReport(METADATA, [row("hf_generate"), row()], []).as_markdown()
    assert "| builtin | 1 | phrase | greedy | 8 | 1.25 | 55.50 | 0.75 | 0.50 | 0.25 |" in text
    assert "| builtin | 1 | hf_generate |" not in text
    assert "The time of a round" not in BenchmarkReport(METADATA, [row("hf_generate")], []).as_markdown()


def test_an_infinite_gap_is_null_in_json():
    ended = Difference("builtin", 1, "a", "b", "p1", 0, 4, None, 8, 0.1, float("inf"))
    stored = BenchmarkReport(METADATA, [row()], [ended]).as_dict()
    assert stored["differences"][0]["gap"] is None
    json.dumps(stored, allow_nan=False)


def test_the_report_has_a_table_per_suite_and_names_the_differences():
    text = BenchmarkReport(METADATA, [row("none"), row(), row(suite="gsm8k")], [DIFFERENCE]).as_markdown()
    assert "## builtin, batch 1, 3 prompts" in text
    assert "## gsm8k, batch 1, 3 prompts" in text
    assert "| builtin | phrase/greedy/8 | p1 | 1 | 4 | 0.125 |" in text


def test_near_ties_are_counted_among_the_greedy_differences():
    wide = replace(DIFFERENCE, gap=0.5)
    sampled = replace(DIFFERENCE, reference="none/sampling", gap=0.0)
    text = BenchmarkReport(METADATA, [row()], [DIFFERENCE, wide, sampled], 0.25).as_markdown()
    assert "up to 0.250" in text
    assert "1 of 2 greedy differences are such near-ties" in text


def test_a_run_without_a_reference_claims_nothing():
    text = BenchmarkReport(METADATA, [row(identical_fraction=None)], []).as_markdown()
    assert "identical to" not in text


def test_a_run_without_differences_says_so():
    assert "All answers are identical" in BenchmarkReport(METADATA, [row()], []).as_markdown()


def test_cells_match_the_columns_and_figures_show_their_interval():
    cells = dict(zip(TABLE_COLUMNS, table_cells(row()), strict=True))
    assert cells["tokens/s"] == "2.0 [1.5, 2.5]"
    assert cells["x HF generate"] == "2.00 [1.50, 2.50]"
    assert (cells["nodes"], cells["round ms"], cells["identical"]) == ("8", "60.5", "50 %")
    assert dict(zip(TABLE_COLUMNS, table_cells(row("hf_generate")), strict=True))["round ms"] == ""


def test_a_named_head_is_shown_by_its_folder():
    assert table_cells(row(head="heads/small"))[0] == "phrase:small"


def test_markdown_rows_have_as_many_cells_as_the_header():
    assert len({line.count("|") for line in markdown_table([row(), row("hf_generate")])}) == 1


def plots_of(tmp_path, rows):
    return sorted(
        path.name for path in BenchmarkReport(METADATA, rows, []).write(tmp_path) if path.suffix == ".png"
    )


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([row("hf_generate"), row("none"), row()], ["speedup.png"]),
        ([row(width=8), row(width=16)], ["acceptance.png", "speedup.png"]),
        ([row(), row(batch_size=4)], ["speedup-batch-1.png", "speedup-batch-4.png"]),
        ([row(speedup_vs_hf_generate=None)], ["speedup.png"]),
        ([row(speedup_vs_hf_generate=None, speedup_vs_none=None)], []),
    ],
)
def test_plots_show_what_there_is(tmp_path, rows, names):
    assert plots_of(tmp_path, rows) == names
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_the_report_shows_its_plots(tmp_path):
    BenchmarkReport(METADATA, [row()], []).write(tmp_path)
    assert "(speedup.png)" in (tmp_path / "report.md").read_text()
