"""Thread counts at start-up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.cli import threads


@pytest.fixture
def cpu_folder(tmp_path):
    """Four logical CPUs on two physical cores."""
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    return tmp_path


@pytest.mark.parametrize(("cpus", "cores"), [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 1}, 2), ({3}, 1)])
def test_hyper_threads_of_a_core_count_once(cpu_folder, cpus, cores):
    assert threads.physical_cores(cpus, cpu_folder) == cores


def test_without_a_topology_every_cpu_is_a_core(tmp_path):
    assert threads.physical_cores({0, 1, 5}, tmp_path) == 3


@pytest.mark.parametrize(
    ("content", "quota"), [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("odd", None)]
)
def test_quota_of_a_container_is_rounded_up(tmp_path, content, quota):
    limit = tmp_path / "cpu.max"
    limit.write_text(content)
    assert threads.cpu_quota(limit) == quota


def test_a_missing_quota_file_means_no_quota(tmp_path):
    assert threads.cpu_quota(tmp_path / "absent") is None


def test_the_quota_caps_the_cores(monkeypatch):
    monkeypatch.setattr(threads, "usable_cpus", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "physical_cores", lambda cpus: len(cpus))
    monkeypatch.setattr(threads, "cpu_quota", lambda: 3)
    assert threads.thread_count() == 3


@pytest.fixture
def torch_threads():
    """The thread count of torch, restored afterwards."""
    import torch

    before = torch.get_num_threads()
    yield torch
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "5"), ({"OMP_NUM_THREADS": "3"}, "3"), ({"OMP_NUM_THREADS": "x"}, "5")]
)
def test_an_exported_thread_count_wins(monkeypatch, torch_threads, given, expected):
    monkeypatch.setattr(threads, "thread_count", lambda: 5)
    environment = dict(given)
    assert threads.configure_threads(environment) == int(expected)
    assert environment["OMP_NUM_THREADS"] == expected
    assert torch_threads.get_num_threads() == int(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, threads.SPIN_COUNT),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_waiting_threads_soon_sleep_unless_the_user_chose(monkeypatch, torch_threads, given, expected):
    environment = dict(given)
    threads.configure_threads(environment)
    assert environment.get("GOMP_SPINCOUNT") == expected


def test_the_command_line_imports_no_torch_before_threads_are_set():
    code = (
        "import sys, paceline.cli, paceline.cli.threads as t; assert 'torch' not in sys.modules;"
        "import paceline.cli.app; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False", "False"]
