"""What is missing for llama.cpp, and what to type."""

from __future__ import annotations

import json

import pytest

from paceline.bench.peers import node_packages
from paceline.bench.peers.node_packages import VERSION, check_package, find_node, install_command
from paceline.errors import MissingDependencyError


def install(folder, version):
    described = folder / "node_modules" / "node-llama-cpp" / "package.json"
    described.parent.mkdir(parents=True)
    described.write_text(json.dumps({"version": version}))


def test_without_node_the_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"no program `node`.*npm install") as caught:
        find_node()
    assert "\n" not in str(caught.value)


def test_without_the_package_the_line_has_the_exact_command(tmp_path):
    with pytest.raises(MissingDependencyError) as caught:
        check_package(tmp_path)
    assert f"`{install_command(tmp_path)}`" in str(caught.value)


def test_another_version_is_refused_and_the_pinned_one_taken(tmp_path):
    install(tmp_path / "old", "3.0.0")
    with pytest.raises(MissingDependencyError, match=r"holds 3\.0\.0"):
        check_package(tmp_path / "old")
    install(tmp_path / "new", VERSION)
    check_package(tmp_path / "new")


def test_a_damaged_package_is_a_missing_one(tmp_path):
    install(tmp_path, VERSION)
    next(tmp_path.rglob("package.json")).write_text("{")
    with pytest.raises(MissingDependencyError, match="is not in"):
        check_package(tmp_path)


@pytest.mark.parametrize(
    ("system", "processor", "binary"),
    [("linux", "x86_64", "linux-x64"), ("linux", "aarch64", "linux-arm64"), ("darwin", "arm64", None)],
)
def test_on_linux_only_the_processors_binary_is_asked_for(system, processor, binary, monkeypatch, tmp_path):
    monkeypatch.setattr(node_packages.sys, "platform", system)
    monkeypatch.setattr(node_packages.platform, "machine", lambda: processor)
    command = install_command(tmp_path)
    assert f'--prefix "{tmp_path}" --ignore-scripts' in command
    assert f" node-llama-cpp@{VERSION}" in command
    assert ("--omit=optional" in command) == (binary is not None)
    if binary is not None:
        assert command.endswith(f" @node-llama-cpp/{binary}@{VERSION}")


def test_packages_are_kept_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    assert str(tmp_path / "peers") in install_command()
