"""Tests that need a CUDA device: `pytest -m gpu` runs them where there is one."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Mark everything in this folder; skip it where there is nothing to run on."""
    missing = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)
