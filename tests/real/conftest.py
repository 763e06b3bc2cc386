"""Tests of the real default target: they use the threads that a user would."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _more_threads() -> Iterator[None]:
    """Two threads, where there are two cores; tiny models everywhere else run on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)
