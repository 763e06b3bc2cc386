"""Between forwards nothing wakes torch's own threads, which would spin on the kernels' cores."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
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
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if task.name != own:
            with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
                found[task.name] = int((task / "schedstat").read_text().split()[2])
    return found


def threads_that_run(work: Callable[[], object]) -> int:
    """How many threads, the calling one left out, are run while `work` is."""
    before = time_slices()
    work()
    return sum(count > before.get(thread, 0) for thread, count in time_slices().items())


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
    allowed = torch.get_num_threads() - 1
    in_torch = threads_that_run(lambda: torch.ones(1000, 1000) + 1.0)
    if allowed and not in_torch:
        pytest.skip("this system does not count how often threads are run")
    both = threads_that_run(lambda: [torch.ones(1000, 1000) + 1.0, generator.generate_batch(PROMPTS, asked)])
    assert both >= allowed + in_torch, "torch's threads are others than the kernels', and counted"
    assert threads_that_run(lambda: generator.generate_batch(PROMPTS, asked)) <= allowed
