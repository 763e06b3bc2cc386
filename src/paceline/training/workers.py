"""The stages that run the target, in this process or in several side by side.

On a CPU two processes with one thread each generate more than one process with two threads: a decoding step
of a small model is a chain of short operations, and threads wait for each other after every one of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.sampling import SamplingParameters
from paceline.training.distill import Distiller, uninterrupted
from paceline.training.options import TrainingOptions
from paceline.training.prompts import TrainingPrompt
from paceline.training.synthesis import Synthesiser, synthesise_into

OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Task:
    """What every worker does, each on its own part.

    Attributes:
        stage: `synthesis` or `answers`.
        options: of the run.
        folder: where its files go.
        prompts: to be answered; empty for synthesis.
        enough: total over all workers at which no new work is begun.
    """

    stage: str
    options: TrainingOptions
    folder: Path
    prompts: tuple[TrainingPrompt, ...]
    enough: int


def run_workers(task: Task, generator: Callable[[], Any], on_progress: OnProgress) -> None:
    """Do a task: with the loaded model here, or in `options.workers` processes that load their own.

    Args:
        task: what to do.
        generator: returns the loaded `Generator`; called only when the work is done in this process.
        on_progress: told the total so far, a few times a second.

    Raises:
        PacelineError: what a worker raised.
    """
    count = task.options.workers
    if count == 1:
        _work(task, generator(), 0, on_progress, lambda: 0)
        return
    context = torch.multiprocessing.get_context("spawn")
    totals = context.Array("q", count)
    receivers, processes = [], []
    with _threads_per_process(max(1, torch.get_num_threads() // count)):
        for index in range(count):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_worker_main, args=(task, index, totals, sender), daemon=True)
            process.start()
            receivers.append(receiver)
            processes.append(process)
    try:
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(timeout=0.5 / count)
            on_progress(_total(totals))
    except KeyboardInterrupt:
        _interrupt(processes)
        raise
    for process, receiver in zip(processes, receivers, strict=True):
        if process.exitcode != 0:
            message = receiver.recv() if receiver.poll() else f"it ended with status {process.exitcode}"
            raise PacelineError(f"a worker failed: {message}")


@contextmanager
def _threads_per_process(count: int) -> Iterator[None]:
    """Processes started inside the block use `count` threads from their first import of torch on.

    A pool of threads in every process would fight over the cores.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _interrupt(processes: Seq[Any]) -> None:
    """Let workers save what they have and end."""
    with uninterrupted():
        for process in processes:
            # From a terminal the workers got the signal too and are ending already.
            process.join(timeout=1.0)
            if process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join()


def _worker_main(task: Task, index: int, totals: Any, sender: Connection) -> None:
    """Entry point of a worker process."""
    # A shell that starts the command in the background has interrupts ignored, by workers as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        generator = load_generator(task.options)

        def report(count: int) -> None:
            totals[index] = count

        _work(task, generator, index, report, lambda: _total(totals) - int(totals[index]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except PacelineError as error:
        sender.send(str(error))
        raise SystemExit(2) from None


def _end_with_parent() -> None:
    """Save and end when the process that started this one is gone: nobody would count or stop the work."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGINT)


def _total(totals: Any) -> int:
    """Sum over all workers."""
    return sum(int(count) for count in totals)


def load_generator(options: TrainingOptions) -> Any:
    """The target with the drafter that is used while generating."""
    from paceline.engine.load import load

    return load(
        options.target,
        drafter=options.drafter,
        head=options.head,
        dtype=options.dtype,
        device=options.device,
        num_speculative_tokens=options.num_speculative_tokens if options.drafter != "none" else 0,
        max_batch_size=options.batch_size,
        trust_remote_code=options.trust_remote_code,
    )


def _work(task: Task, generator: Any, index: int, report: OnProgress, others: Callable[[], int]) -> None:
    """One worker's part."""
    if task.stage == "synthesis":
        synthesise_into(
            task.folder / f"prompts-{index}.jsonl",
            build_synthesiser(task.options, generator),
            range(index, task.enough, task.options.workers),
            report,
        )
        return
    distiller = build_distiller(task.options, generator, task.folder, shard_prefix=str(index))
    distiller.run(
        _part(task.prompts, index, task.options.workers), lambda own: own + others() >= task.enough, report
    )


def _part(prompts: Seq[TrainingPrompt], index: int, count: int) -> list[TrainingPrompt]:
    """The conversations of one worker; which ones does not depend on the order."""
    return [prompt for prompt in prompts if int(prompt.root_key, 16) % count == index]


def build_synthesiser(options: TrainingOptions, generator: Any) -> Synthesiser:
    """The synthesiser that the options ask for."""
    return Synthesiser(
        generator.target,
        generator.tokenizer,
        eos_token_ids=generator.eos_token_ids,
        seed=options.seed,
        follow_up_fraction=options.follow_ups,
        batch_size=options.batch_size,
    )


def build_distiller(
    options: TrainingOptions, generator: Any, folder: Path, *, shard_prefix: str = "0"
) -> Distiller:
    """The distiller that the options ask for."""
    return Distiller(
        generator.target,
        generator.tokenizer,
        generator.drafter,
        eos_token_ids=generator.eos_token_ids,
        folder=folder,
        parameters=SamplingParameters(max_new_tokens=options.max_new_tokens, temperature=options.temperature),
        feature_layers=options.recorded_layers,
        seed=options.seed,
        batch_size=options.batch_size,
        num_speculative_tokens=options.num_speculative_tokens if options.drafter != "none" else 0,
        shard_prefix=shard_prefix,
    )
