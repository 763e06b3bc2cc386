"""What slows decoding down, and how it is found."""

from __future__ import annotations

import json

import pytest

from paceline.cli import doctor as doctor_module
from paceline.cli.doctor import doctor, openmp_libraries, problems

HEALTHY = {
    "threads": 2,
    "cores": 2,
    "load": 0.1,
    "openmp": ["/lib/libgomp.so.1"],
    "wait_policy": "",
    "features": {"amx_bf16": True, "avx512_bf16": True},
    "has_gpu": False,
}


def test_a_healthy_machine_has_no_problems():
    assert problems(**HEALTHY) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threads": 4}, "OMP_NUM_THREADS=2"),
        ({"load": 3.0}, "busy"),
        ({"openmp": ["/lib/libgomp.so.1", "/lib/libiomp5.so"]}, "libiomp5.so"),
        ({"wait_policy": "ACTIVE"}, "unset it"),
        ({"features": {"amx_bf16": False, "avx512_bf16": False}}, "fp32"),
    ],
)
def test_each_cause_of_slowness_is_named(changes, words):
    [problem] = problems(**(HEALTHY | changes))
    assert words in problem


def test_a_gpu_makes_missing_bf16_instructions_irrelevant():
    assert problems(**(HEALTHY | {"features": {"amx_bf16": False}, "has_gpu": True})) == []


def test_openmp_runtimes_are_found_among_the_loaded_files(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00 r-xp 00 fe:00 12 /opt/torch/lib/libgomp-a34b.so.1\n"
        "7f01 r--p 00 fe:00 12 /opt/torch/lib/libgomp-a34b.so.1\n"
        "7f02 r-xp 00 fe:00 13 /opt/other/libiomp5.so\n"
        "7f03 r-xp 00 fe:00 14 /opt/other/libcompute.so\n"
    )
    assert openmp_libraries(maps) == ["/opt/other/libiomp5.so", "/opt/torch/lib/libgomp-a34b.so.1"]
    assert openmp_libraries(tmp_path / "absent") == []


def test_findings_are_printed_for_people_and_as_json(capsys, monkeypatch):
    monkeypatch.setattr(doctor_module.os, "getloadavg", lambda: (99.0, 0, 0))
    doctor()
    text = capsys.readouterr().out
    assert "torch" in text
    assert "problem: the machine is busy" in text
    doctor(as_json=True)
    findings = json.loads(capsys.readouterr().out)
    assert findings["threads"] >= 1
    assert findings["versions"]["torch"]
    assert any("busy" in problem for problem in findings["problems"])
