"""Prometheus metrics under `paceline:`, with vLLM's names behind the prefix where it has them.

A registry of its own, so that several servers in one process (tests) do not meet.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from paceline.engine.generator import GenerationResult
from paceline.engine.speculate import RoundOutcome

MAX_POSITIONS = 32
"""Depths of drafted tokens that are counted apart; deeper ones count with the last."""
FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class ServerMetrics:
    """What a server counts; each attribute is one metric."""

    def __init__(self) -> None:
        # The time at which each counter was made says nothing here, and doubles the page.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.num_drafts = self._counter("spec_decode_num_drafts", "Drafts that were verified.")
        self.num_draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self.num_accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens that were emitted."
        )
        self.num_accepted_per_pos = Counter(
            "paceline:spec_decode_num_accepted_tokens_per_pos",
            "The same by their place in the draft, from 0.",
            ["position"],
            registry=self.registry,
        )
        self.num_relaxed_tokens = self._counter(
            "spec_decode_num_relaxed_tokens", "Emitted tokens that a lossy verifier kept."
        )
        self.regret_spent = self._counter("spec_decode_regret_spent", "Logits that they cost.")
        self.num_prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.num_reused_tokens = self._counter(
            "prefix_cache_hits", "Of those, tokens that were still cached from an earlier turn."
        )
        self.num_generated_tokens = self._counter("generation_tokens", "Emitted tokens.")
        self.num_finished = Counter(
            "paceline:request_success", "Finished answers.", ["finished_reason"], registry=self.registry
        )
        self.num_refused = self._counter("requests_refused", "Requests that found the queue full.")
        self.num_expired = self._counter("requests_expired", "Requests whose deadline passed.")
        self.num_disconnected = self._counter("requests_disconnected", "Requests whose client left.")
        self.num_failures = self._counter("engine_failures", "Rounds that ended in an error.")
        self.num_running = self._gauge("num_requests_running", "Answers that are being decoded.")
        self.num_waiting = self._gauge("num_requests_waiting", "Answers that wait for a place.")
        self.num_cached_tokens = self._gauge("kv_cache_tokens", "Tokens whose keys and values are held.")
        self.num_kept_tokens = self._gauge(
            "prefix_cache_tokens", "Of those, tokens of finished conversations, kept for their next turn."
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.token_seconds = self._histogram(
            "time_per_output_token_seconds", "Of an answer, after its first token.", TOKEN_BUCKETS
        )

    def record(self, outcome: RoundOutcome) -> None:
        """Count a round of one answer."""
        result = outcome.result
        num_accepted = len(result.accepted_ids)
        self.num_generated_tokens.inc(len(result.emitted_ids))
        if outcome.tree.num_draft_tokens:
            self.num_drafts.inc()
            self.num_draft_tokens.inc(outcome.tree.num_draft_tokens)
            self.num_accepted_tokens.inc(num_accepted)
            for position in range(num_accepted):
                self.num_accepted_per_pos.labels(str(min(position, MAX_POSITIONS - 1))).inc()
        if result.num_relaxed:
            self.num_relaxed_tokens.inc(result.num_relaxed)
            self.regret_spent.inc(result.charge)

    def finish(self, result: GenerationResult, num_later: int, seconds: float) -> None:
        """Count a finished answer, of which so many tokens came in so long after its first round."""
        self.num_finished.labels(result.finish_reason).inc()
        if num_later > 0:
            self.token_seconds.observe(seconds / num_later)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"paceline:{name}", meaning, registry=self.registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(f"paceline:{name}", meaning, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"paceline:{name}", meaning, buckets=buckets, registry=self.registry)
