"""The audit of dependencies, on canned reports: the index is not to be asked by a test."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / ".ci" / "audit.py"
FIXED = {"name": "jinja2", "version": "3.1.2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1.3", "3.2"]}]}
UNFIXED = {"name": "old", "version": "1", "vulns": [{"id": "PYSEC-2", "fix_versions": []}]}
CLEAN = {"name": "torch", "version": "2.13.0", "vulns": []}
UNKNOWN = {"name": "mine", "skip_reason": "not on PyPI"}


@pytest.fixture(scope="module")
def audit():
    found = importlib.util.spec_from_file_location("audit", SOURCE)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("dependencies", "code", "lines"),
    [
        ([CLEAN, UNKNOWN], 0, ["1 dependencies audited"]),
        ([FIXED, CLEAN], 1, ["jinja2 3.1.2: PYSEC-1, fixed in 3.1.3, 3.2", "2 dependencies audited"]),
        ([UNFIXED], 0, ["old 1: PYSEC-2, no release fixes it", "1 dependencies audited"]),
        ([FIXED, UNFIXED], 1, None),
    ],
    ids=["clean", "fixed elsewhere", "nobody can act", "both"],
)
def test_fails_only_where_a_release_fixes_it(audit, capsys, dependencies, code, lines):
    assert audit.main(lambda: True, lambda: json.dumps({"dependencies": dependencies})) == code
    if lines is not None:
        assert capsys.readouterr().out.splitlines() == lines


def test_a_report_that_is_none_is_told(audit, capsys):
    assert audit.main(lambda: True, lambda: "") == 1
    assert capsys.readouterr().out == "dependencies are not audited: pip-audit broke off\n"


def test_without_an_index_nothing_is_asked(audit, capsys):
    assert audit.main(lambda: False, lambda: pytest.fail("asked")) == 0
    assert "no index with advisories" in capsys.readouterr().out


@pytest.mark.parametrize("body", ["no JSON", "{}", '{"vulnerabilities": []}'])
def test_an_index_without_advisories_is_none(audit, tmp_path, body):
    page = tmp_path / "json"
    page.write_text(body)
    assert not audit.has_advisories(page.as_uri())


def test_an_index_with_advisories_is_one(audit, tmp_path):
    page = tmp_path / "json"
    page.write_text('{"vulnerabilities": [{"id": "PYSEC-1"}]}')
    assert audit.has_advisories(page.as_uri())
    assert not audit.has_advisories((tmp_path / "missing").as_uri())
