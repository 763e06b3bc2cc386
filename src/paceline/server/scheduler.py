"""Continuous batching: one thread drives the engine, requests join and leave between its forwards.

Everything that touches the engine happens in that thread. The event loop hands it jobs and cancellations
through a queue and gets events back (`jobs.py`). Requests are served in the order of their arrival, as many
at once as the engine's batch allows; how much is drafted for each is the node budget's matter, which drafts
less as the batch grows and nothing once plain decoding is faster.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.engine.generator import Answer, Generator
from paceline.engine.speculate import RoundOutcome
from paceline.errors import PacelineError
from paceline.sequence import Sequence
from paceline.server.errors import ApiError, bad_request, past_deadline, refused, too_busy, unavailable
from paceline.server.jobs import ChoiceEvent, FirstRound, Job
from paceline.server.metrics import ServerMetrics
from paceline.server.prefixes import PrefixCache
from paceline.server.requests import Question, Work

_LOG = logging.getLogger("paceline.server")
IDLE_SECONDS = 0.5
"""Longest sleep of the thread without work: how late a deadline in the queue may be noticed."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose sequence it is."""

    job: Job
    choice: int


class Scheduler:
    """Takes requests in, answers them.

    Args:
        generator: target, drafters and tokenizer; nobody else may use it meanwhile.
        metrics: what happens is counted there.
        max_queue: requests that may wait for a place; further ones are refused.
        prefix_tokens: tokens of finished conversations whose cache stays for their next turn.
    """

    def __init__(
        self,
        generator: Generator,
        metrics: ServerMetrics,
        *,
        max_queue: int = 64,
        prefix_tokens: int = 16_384,
    ) -> None:
        self.generator = generator
        self.metrics = metrics
        self.max_queue = max_queue
        self.prefixes = PrefixCache(
            prefix_tokens,
            generator.engine.max_batch_size,
            lambda answer: generator.engine.release(answer.sequence),
        )
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[Job, None] = {}
        self._owners: dict[Sequence, _Owner] = {}
        self._num_open = 0
        self._lock = threading.Lock()
        self._seconds_per_job = 1.0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests in flight get an error."""
        self._is_stopping.set()
        self._inbox.put(lambda: None)
        self._thread.join()

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be answered."""
        return self._thread.is_alive() and not self._is_stopping.is_set()

    def submit(self, work: Work) -> Job:
        """Queue a request; called in the event loop.

        Raises:
            ApiError: the queue is full, or the server does not work.
        """
        if not self.is_healthy:
            raise unavailable("the server is shutting down")
        limit = self.generator.engine.max_batch_size + self.max_queue
        if len(work.questions) > limit:
            raise bad_request(
                f"n times the prompts is {len(work.questions)}: this server takes {limit} answers at once",
                param="n",
            )
        with self._lock:
            if self._num_open + len(work.questions) > limit:
                self.metrics.num_refused.inc()
                raise too_busy(self._retry_after())
            self._num_open += len(work.questions)
        job = Job(work, asyncio.get_running_loop())
        self._inbox.put(lambda: self._admit(job))
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for this request any more; it leaves before the next forward."""
        job.is_cancelled = True
        self._inbox.put(lambda: self._leave(job))

    def drop_prefixes(self) -> None:
        """Free what is kept for later turns."""
        self._inbox.put(self.prefixes.clear)

    def _retry_after(self) -> int:
        """Seconds after which a place may be free: half the queue, at the pace of the newest answers."""
        rounds = self.max_queue / max(1, self.generator.engine.max_batch_size) / 2
        return max(1, math.ceil(rounds * self._seconds_per_job))

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        """Rounds while there is work, sleep while there is none."""
        while not self._is_stopping.is_set():
            try:
                self._drain(IDLE_SECONDS if not self.generator.engine.has_work else None)
                for outcomes in self.generator.engine.steps():
                    for outcome in outcomes:
                        self._deliver(outcome)
                    self._report_refused()
                    self._drain(None)
                    self._expire()
                    if self._is_stopping.is_set():
                        break
                self._observe()
            except Exception as error:
                # Whatever it was, the engine's state is not to be trusted with these sequences any more.
                if not self._fail_all(error):
                    break
        self._is_stopping.set()
        # What arrived meanwhile is told as well.
        self._drain(None)
        self._abandon_all(unavailable("the server is shutting down"))

    def _drain(self, wait: float | None) -> None:
        """Take in what arrived; wait for the first of it where there is nothing else to do."""
        try:
            if wait is not None:
                self._inbox.get(timeout=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _admit(self, job: Job) -> None:
        """Open the choices of a new request."""
        self._jobs[job] = None
        if job.is_cancelled:
            self._leave(job)
            return
        if self._is_stopping.is_set():
            return
        try:
            for choice, question in enumerate(job.work.questions):
                answer = self._open(question)
                job.answers[choice] = answer
                self._owners[answer.sequence] = _Owner(job, choice)
        except PacelineError as error:
            job.deliver(refused(error))
            self._leave(job)
        except Exception as error:
            # Nothing of it has been computed yet: the others do not pay for it.
            _LOG.exception("a request could not be taken in", exc_info=error)
            job.deliver(_internal())
            self._leave(job)
        else:
            job.deliver(None)

    def _open(self, question: Question) -> Answer:
        """Submit one choice, on the cache of an earlier turn where there is one."""
        former = self.prefixes.take(question.prompt_ids) if question.keeps_prefix else None
        try:
            answer = self.generator.open(
                list(question.prompt_ids),
                question.parameters,
                former=former,
                keeps_cache=question.keeps_prefix,
                verifier=question.verifier,
                drafter=question.drafter,
                max_draft_tokens=question.max_draft_tokens,
            )
        except Exception:
            if former is not None:
                self.prefixes.keep(former)
            raise
        if question.choice == 0:
            self.metrics.num_prompt_tokens.inc(len(question.prompt_ids))
        self.metrics.num_reused_tokens.inc(self.generator.target.cached_len(answer.sequence))
        return answer

    def _deliver(self, outcome: RoundOutcome) -> None:
        """Send what a round brought to whoever waits for it."""
        owner = self._owners.get(outcome.sequence)
        if owner is None:
            return
        job, choice = owner.job, owner.choice
        event = job.answers[choice].advance(outcome)
        now = time.monotonic()
        if job.first_token is None:
            job.first_token = now
            self.metrics.first_token_seconds.observe(now - job.arrived)
        first = job.first_rounds.setdefault(choice, FirstRound(now, len(event.token_ids)))
        self.metrics.record(outcome)
        job.deliver(ChoiceEvent(choice, event))
        if event.result is not None:
            num_later = len(event.result.token_ids) - first.num_tokens
            self.metrics.finish(event.result, num_later, now - first.time)
            self._finish(job, choice)

    def _report_refused(self) -> None:
        """End requests that the engine let go of: their grammar cannot be followed any further."""
        refused_now = [
            (sequence.error, owner.job) for sequence, owner in self._owners.items() if sequence.error
        ]
        for error, job in refused_now:
            job.deliver(refused(error))
            self._leave(job)

    def _finish(self, job: Job, choice: int) -> None:
        """Take a finished choice out, and keep its cache for the conversation's next turn."""
        answer = job.answers.pop(choice)
        del self._owners[answer.sequence]
        if job.work.questions[choice].keeps_prefix:
            self.prefixes.keep(answer)
        job.num_open -= 1
        self._free_places(1)
        if job.num_open == 0:
            del self._jobs[job]
            self._seconds_per_job += 0.2 * (time.monotonic() - job.arrived - self._seconds_per_job)

    def _leave(self, job: Job) -> None:
        """Release what is left of a request, and its places."""
        if job not in self._jobs:
            return
        del self._jobs[job]
        for answer in job.answers.values():
            del self._owners[answer.sequence]
            self.generator.engine.release(answer.sequence)
        job.answers.clear()
        self._free_places(job.num_open)
        job.num_open = 0

    def _free_places(self, num_places: int) -> None:
        """Let as many others in."""
        with self._lock:
            self._num_open -= num_places

    def _expire(self) -> None:
        """Give up requests whose deadline has passed."""
        now = time.monotonic()
        for job in [job for job in self._jobs if job.deadline is not None and job.deadline <= now]:
            job.deliver(past_deadline(job.work.deadline_seconds or 0.0))
            self.metrics.num_expired.inc()
            self._leave(job)

    def _observe(self) -> None:
        """Show how busy it is."""
        engine = self.generator.engine
        self.metrics.num_running.set(engine.num_running)
        self.metrics.num_waiting.set(engine.num_waiting)
        self.metrics.num_kept_tokens.set(self.prefixes.num_tokens)
        self.metrics.num_cached_tokens.set(
            sum(self.generator.target.cached_len(sequence) for sequence in self._owners)
            + self.prefixes.num_tokens
        )

    def _fail_all(self, error: Exception) -> bool:
        """Tell everybody that the engine failed, and go on without their sequences; False: not at all."""
        _LOG.exception("the engine failed", exc_info=error)
        self.metrics.num_failures.inc()
        return self._abandon_all(_internal())

    def _abandon_all(self, error: ApiError) -> bool:
        """End all requests with an error and free everything; False where that fails as well."""
        is_clean = True
        for job in list(self._jobs):
            # First of all they are told: what comes next may fail.
            job.deliver(error)
        for job in list(self._jobs):
            try:
                self._leave(job)
            except Exception as failure:
                _LOG.exception("a failed request could not be freed", exc_info=failure)
                is_clean = False
        try:
            self.prefixes.clear()
        except Exception as failure:
            _LOG.exception("kept conversations could not be freed", exc_info=failure)
            is_clean = False
        return is_clean


def _internal() -> ApiError:
    """Something failed in here."""
    return ApiError(500, "the engine failed: see the server's log", kind="server_error")
