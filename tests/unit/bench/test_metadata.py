"""What a report tells about the machine."""

from __future__ import annotations

import subprocess

from paceline.bench.metadata import cpu_features, cpu_model, git_revision, package_versions, run_metadata

CPU_FILE = (
    "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu avx2 amx_bf16\n\nmodel name\t: Another\n"
)


def test_the_processor_is_read_from_its_description(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(CPU_FILE)
    assert cpu_model(path) == "A Processor"
    features = cpu_features(path)
    assert features["avx2"]
    assert features["amx_bf16"]
    assert not features["avx512_bf16"]


def test_a_system_that_does_not_tell_has_no_features(tmp_path):
    assert cpu_features(tmp_path / "absent") == {}
    assert isinstance(cpu_model(tmp_path / "absent"), str)


def test_packages_that_are_not_installed_have_no_version():
    assert package_versions(("torch", "no-such-package-x"))["no-such-package-x"] is None
    assert package_versions(("torch",))["torch"]


def git(folder, *words):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *words],
        check=True,
        capture_output=True,
    )


def test_the_revision_is_marked_when_the_tree_was_changed(tmp_path):
    assert git_revision(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    clean = git_revision(tmp_path)
    assert len(clean) == 12
    (tmp_path / "file").write_text("b")
    assert git_revision(tmp_path) == clean + "+"


def test_a_run_notes_command_versions_machine_and_settings():
    metadata = run_metadata("paceline bench", {"seed": 3})
    assert metadata["command"] == "paceline bench"
    assert metadata["settings"] == {"seed": 3}
    assert metadata["versions"]["torch"]
    assert metadata["machine"]["threads"] >= 1
