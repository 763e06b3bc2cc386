"""docs/faults.md names tests that exist, and every fault test names its rows."""

from __future__ import annotations

import ast
import re

import pytest

from conftest import ROOT

FOLDERS = {"C/": "tests/conformance/", "R/": "tests/real/", "U/": "tests/unit/"}
TABLE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\d-]+) \|(.*)\|$", TABLE, re.MULTILINE)


def functions(path):
    """Name -> docstring of the tests in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return {node.name: ast.get_docstring(node) or "" for node in tests}


@pytest.mark.parametrize(("row", "cells"), ROWS, ids=[row for row, _ in ROWS])
def test_every_test_named_in_a_row_exists(row, cells):
    path = None
    named = re.findall(r"`((?:[CRU]/|tests/|::)[\w/.]*(?:::\w+)?)`", cells)
    assert named
    for name in named:
        file_name, _, function = name.partition("::")
        if file_name:
            path = ROOT / (FOLDERS.get(file_name[:2], file_name[:2]) + file_name[2:])
        assert path is not None
        assert path.is_file(), name
        assert not function or function in functions(path), name


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "conformance").glob("test_faults_*.py")), ids=str)
def test_every_fault_test_says_which_rows_it_guards(path):
    known = {row for row, _ in ROWS}
    for name, docstring in functions(path).items():
        if path.name == "test_faults_table.py":
            continue
        mentioned = re.match(r"(?:Rows? ([\d, and]+):|Cancellation:|Two streams)", docstring)
        assert mentioned, name
        assert set(re.findall(r"\d+", mentioned[1] or "")) <= known, name
