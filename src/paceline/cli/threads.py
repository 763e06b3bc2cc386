"""Thread counts, set once at start-up and before torch is imported.

A forward of a small model is a chain of short parallel regions. More threads than cores, or a second pool
beside the first, makes every region wait for the scheduler: measured forwards went from tens of
milliseconds to seconds. So the process gets exactly one OpenMP pool with one thread per physical core that
it may use.
Waiting threads spin for a moment and then sleep (see SPIN_COUNT): OpenMP's own default spins so long that
forwards of 65 ms went to 700 ms while another process ran.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

SPIN_COUNT = "1000"
CPU_FOLDER = Path("/sys/devices/system/cpu")
CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus() -> set[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], cpu_folder: Path = CPU_FOLDER) -> int:
    """Number of different physical cores among `cpus`: hyper-threads of one core count once."""
    cores = set()
    for cpu in cpus:
        siblings = cpu_folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def cpu_quota(limit_file: Path = CGROUP_LIMIT) -> int | None:
    """CPUs that a container's quota pays for, rounded up; None without a quota."""
    try:
        quota, period = limit_file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def thread_count() -> int:
    """Threads to compute with: physical cores, within the quota."""
    cores = physical_cores(usable_cpus())
    quota = cpu_quota()
    return cores if quota is None else min(cores, quota)


def configure_threads(environment: MutableMapping[str, str] | None = None) -> int:
    """Give torch its thread count; a count that the user exported wins.

    Args:
        environment: changed in place; by default this process's.

    Returns:
        The number of threads.
    """
    environment = os.environ if environment is None else environment
    given = environment.get("OMP_NUM_THREADS", "")
    num_threads = int(given) if given.isdigit() and int(given) > 0 else thread_count()
    environment["OMP_NUM_THREADS"] = str(num_threads)
    # A thread that spins at a barrier takes its core from the very thread it waits for.
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # The tokenizer's own pool has nothing to do beside a decoding loop and would compete with it.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch = sys.modules.get("torch")
    if torch is not None:
        # Too late for the environment: somebody imported torch before the command line started.
        torch.set_num_threads(num_threads)
    return num_threads
