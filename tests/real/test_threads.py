"""Between forwards nothing wakes torch's own threads, which would spin on the kernels' cores."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep

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


def threads_that_run(work: Callable[[], object]) -> set[str]:
    """Threads, the calling one left out, that are run while `work` is."""
    sleep(0.5)  # what ran before goes to sleep
    before = time_slices()
    work()
    return {thread for thread, count in time_slices().items() if count > before.get(thread, 0)}


def in_torch() -> object:
    """An operation that torch divides among its threads."""
    return torch.ones(1000, 1000) + 1.0


# An EAGLE head is computed by torch, with torch's threads.
OWN_KERNELS = [name for name in drafter_names() if not name.startswith("eagle3")]


@pytest.mark.parametrize("drafter", OWN_KERNELS)
def test_torchs_threads_stay_asleep(threaded, drafter):
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
    torch_threads = threads_that_run(in_torch) - threads_that_run(lambda: sleep(0.05))
    if not torch_threads:
        pytest.skip("torch has no threads of its own here, or the system does not count how often they run")
    assert torch_threads <= threads_that_run(lambda: [in_torch(), generator.generate_batch(PROMPTS, asked)])
    assert not torch_threads & threads_that_run(lambda: generator.generate_batch(PROMPTS, asked))
