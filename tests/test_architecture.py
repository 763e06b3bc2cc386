"""The shape of the code base: layers, names, and who may touch Hugging Face caches."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
FILES = sorted(SOURCE.rglob("*.py"))


def test_imports_point_downwards_only(monkeypatch, capsys):
    from importlinter.cli import lint_imports

    monkeypatch.chdir(SOURCE.parent.parent)
    assert lint_imports(no_cache=True) == 0, capsys.readouterr().out


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_explain_themselves_and_have_a_noun_for_a_name(path):
    assert path.stem not in {"utils", "common", "core", "misc", "helpers", "scripts", "manager"}
    tree = ast.parse(path.read_text("utf-8"))
    assert ast.get_docstring(tree)


def test_only_the_kv_cache_knows_hugging_face_caches():
    users = {str(path.relative_to(SOURCE)) for path in FILES if "cache_utils" in path.read_text("utf-8")}
    assert users == {"kv_cache.py"}
