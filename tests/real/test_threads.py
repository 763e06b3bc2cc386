"""Between forwards nothing wakes torch's own threads, which would spin on the cores of the kernels' threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.engine.generator import Generator
from paceline.registry import drafter_class, drafter_names
from paceline.sampling import SamplingParameters

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc"),
]
PROMPTS = [f"Count from {start} to {start + 9}, then tell me what you did." for start in range(16)]


@pytest.fixture(scope="module")
def threaded() -> Iterator[Generator]:
    """The default target on the fast path, with two threads where there are two cores."""
    import paceline

    before = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    generator = paceline.load("smollm2", drafter="none", dtype="fp32", device="cpu")
    if generator.target.execution != "fast":
        pytest.skip(f"no fast path here: {generator.target.eager_reason}")
    yield generator
    torch.set_num_threads(before)


def time_slices() -> dict[str, int]:
    """Thread -> how often it has been run, the calling one left out."""
    own = str(threading.get_native_id())
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != own]
    return {task.name: int((task / "schedstat").read_text().split()[2]) for task in tasks}


@pytest.mark.parametrize("drafter", drafter_names())
def test_only_the_kernels_threads_run(threaded, drafter):
    """A batch of sixteen: large enough that careless indexing of its hidden states is done in parallel."""
    generator = Generator(
        threaded.target,
        threaded.tokenizer,
        drafter_class(drafter).build(threaded.target, None, 2),
        eos_token_ids=tuple(threaded.eos_token_ids),
        num_speculative_tokens=2,
    )
    asked = SamplingParameters(max_new_tokens=24)
    generator.generate_batch(PROMPTS, asked)  # buffers grow, and kernels are loaded
    before = time_slices()
    generator.generate_batch(PROMPTS, asked)
    ran = [thread for thread, count in time_slices().items() if count > before.get(thread, 0)]
    assert len(ran) <= torch.get_num_threads() - 1
