"""The public names, and what importing the package may cost."""

from __future__ import annotations

import subprocess
import sys

import paceline


def test_public_names_are_sorted_and_resolve():
    assert list(paceline.__all__) == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None


def test_unknown_names_raise_attribute_error():
    assert not hasattr(paceline, "no_such_name")


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, paceline; print('torch' in sys.modules, 'transformers' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False", "False"]
