"""The floor that memory sets, from records of known content."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench_fakes import record, statistics
from paceline.bench import roofline as module
from paceline.bench.arms import ArmName
from paceline.bench.report import BenchmarkReport
from paceline.bench.roofline import measured_bandwidth, roofline

HF, NONE, PHRASE = ArmName("hf_generate"), ArmName("none"), ArmName("phrase", "greedy", 8)
TARGET = SimpleNamespace(num_read_bytes=1_000_000, num_cache_bytes_per_token=1000)


@pytest.fixture
def floor():
    records = [
        record(HF, 0, [7] * 20, 4.0),
        record(NONE, 0, [7] * 20, 3.0, counts=statistics(rounds=20, tokens=20), prompt_ids=range(90)),
        record(PHRASE, 0, [7] * 20, 1.0, counts=statistics(rounds=10, tokens=20), prompt_ids=range(90)),
        record(PHRASE, 1, [7] * 40, 1.0, counts=statistics(rounds=30, tokens=40), prompt_ids=range(180)),
    ]
    return roofline(records, [HF, NONE, PHRASE], TARGET, bandwidth=1e9)


def test_a_round_reads_the_weights_and_what_is_cached(floor):
    """100 tokens are cached on average half way through; 7 ms of forward a round (see bench_fakes)."""
    plain = next(row for row in floor.rows if row.arm == str(NONE))
    assert plain.bytes_per_round == 1_000_000 + 100 * 1000
    assert plain.floor_ms == pytest.approx(1.1)
    assert plain.forward_ms == pytest.approx(7.0)
    assert plain.share == pytest.approx(1.1 / 7.0)


def test_long_answers_count_by_their_rounds(floor):
    """10 rounds at 100 tokens and 30 at 200."""
    drafted = next(row for row in floor.rows if row.arm == str(PHRASE))
    assert drafted.bytes_per_round == 1_000_000 + 175 * 1000


def test_baselines_have_no_rounds_to_judge(floor):
    assert {row.arm for row in floor.rows} == {str(NONE), str(PHRASE)}


def test_the_bandwidth_is_that_of_the_fastest_pass(monkeypatch):
    """The slower ones were disturbed."""
    monkeypatch.setattr(module, "BUFFER_BYTES", 8000)
    ticks = iter([0.0, 4.0, 10.0, 12.0, *range(20, 40)])
    assert measured_bandwidth(clock=lambda: next(ticks)) == 8000 / 1.0


def test_the_report_shows_the_floor(floor):
    metadata = {
        "command": "paceline bench",
        "date": "today",
        "machine": {"cpu": "a processor", "threads": 2},
        "settings": {"dtype": "bf16", "target": "tiny", "max_new_tokens": 8},
    }
    report = BenchmarkReport(metadata, [], [], None, floor)
    assert "| builtin | none/greedy | 1 | 1 | 1.1 | 7.0 | 16% |" in report.as_markdown()
    assert report.as_dict()["roofline"]["weight_bytes"] == 1_000_000
    assert "Roofline" not in BenchmarkReport(metadata, [], []).as_markdown()
