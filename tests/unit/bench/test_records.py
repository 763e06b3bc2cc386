"""Records on disk, and runs that go on after an interruption."""

from __future__ import annotations

import pytest

from bench_fakes import record, statistics
from paceline.bench.arms import ArmName
from paceline.bench.records import RECORDS_FILE, Journal
from paceline.errors import ConfigError

ARM = ArmName("none")


def test_records_survive_a_round_trip(tmp_path):
    written = [
        record(ARM, 0, [7, 8], 0.5, counts=statistics(rounds=2, tokens=2)),
        record(ArmName("hf_generate"), 0, [7, 8], 0.75),
    ]
    journal = Journal(tmp_path, {"seed": 0})
    for one in written:
        journal.add(one)
    read = Journal(tmp_path, {"seed": 0})
    assert list(read) == written
    assert written[0].key in read
    assert len(read) == 2


def test_a_line_cut_short_is_dropped_and_the_next_one_starts_cleanly(tmp_path):
    journal = Journal(tmp_path, {})
    journal.add(record(ARM, 0, [7], 0.5))
    path = tmp_path / RECORDS_FILE
    path.write_bytes(path.read_bytes() + b'{"key": {"suite": "bui')
    resumed = Journal(tmp_path, {})
    assert len(resumed) == 1
    resumed.add(record(ARM, 1, [8], 0.5))
    assert [one.key.group for one in Journal(tmp_path, {})] == [0, 1]


def test_an_interruption_before_the_settings_were_written_starts_anew(tmp_path):
    (tmp_path / RECORDS_FILE).write_text('{"see')
    Journal(tmp_path, {"seed": 0})
    assert len(Journal(tmp_path, {"seed": 0})) == 0


def test_other_settings_are_refused_and_named(tmp_path):
    Journal(tmp_path, {"seed": 0, "dtype": "fp32"})
    with pytest.raises(ConfigError, match="dtype was 'fp32', now 'bf16'"):
        Journal(tmp_path, {"seed": 0, "dtype": "bf16"})


def test_settings_are_compared_as_json(tmp_path):
    Journal(tmp_path, {"batch_sizes": (1, 4)})
    assert len(Journal(tmp_path, {"batch_sizes": [1, 4]})) == 0


def test_without_a_folder_nothing_is_written(tmp_path):
    journal = Journal(None, {})
    journal.add(record(ARM, 0, [7], 0.5))
    assert len(journal) == 1
    assert list(tmp_path.iterdir()) == []
