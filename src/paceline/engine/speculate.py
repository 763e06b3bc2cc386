"""The round: draft, verify, accept, commit. Read this file first.

One `SpeculativeEngine.round()` advances every running sequence by one verified draft tree:

1. `drafter.propose` guesses a tree per sequence; its root is the newest committed token.
2. `target.forward` scores all trees at once (and prompt chunks of sequences that just arrived).
3. processors apply penalties and bans to every node, each with its own history.
4. the verifier keeps a path and adds the target's own next token.
5. `sequence.accept` trims that at the first stop condition; cache, drafter and statistics see the
   trimmed result.

Drafter `none` proposes root-only trees, so plain decoding is this same loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from paceline.config import DEFAULT_NUM_SPECULATIVE_TOKENS
from paceline.drafters.base import DraftProposer
from paceline.drafters.none import NoDrafter
from paceline.drafters.switching import SwitchingDrafter
from paceline.engine.grammar import GrammarTokenizer
from paceline.engine.log_probs import token_log_probs
from paceline.engine.node_budget import NodeBudget, budget_of
from paceline.engine.prefill import PREFILL_CHUNK, FixedPace, PrefillPace, ReadingOrder
from paceline.engine.processors import TreeProcessor, build_processors
from paceline.engine.stats import RoundTiming
from paceline.errors import ConfigError, RequestError, ShapeError
from paceline.registry import verifier_class
from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.targets.base import TargetModel
from paceline.tree import DraftTree
from paceline.verifiers.base import Verifier


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What one round did for one sequence.

    Attributes:
        sequence: advanced by the round.
        tree: what was drafted.
        result: what was kept, trimmed at stops.
        timing: seconds of the whole forward group and its size.
    """

    sequence: Sequence
    tree: DraftTree
    result: VerifyResult
    timing: RoundTiming


@dataclass(slots=True)
class _Running:
    """What the engine remembers of a sequence between rounds."""

    verifier: str
    processors: list[TreeProcessor]
    keeps_cache: bool


class SpeculativeEngine:
    """Advances a list of sequences round by round on one target and one drafter.

    Args:
        target: the frozen model.
        drafter: proposes the trees.
        num_speculative_tokens: most drafted nodes per sequence and round, or the budget that decides.
        max_batch_size: sequences that run at once; others wait in order.
        prefill_chunk: most prompt tokens of one forward, or what decides it.
        grammars: for requests with a grammar; they are refused without it.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DraftProposer,
        *,
        num_speculative_tokens: int | str | NodeBudget = DEFAULT_NUM_SPECULATIVE_TOKENS,
        max_batch_size: int = 16,
        prefill_chunk: int | PrefillPace = PREFILL_CHUNK,
        grammars: GrammarTokenizer | None = None,
    ) -> None:
        budget = (
            budget_of(num_speculative_tokens, target)
            if isinstance(num_speculative_tokens, int | str)
            else num_speculative_tokens
        )
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size is {max_batch_size}: it must be at least 1")
        self.target = target
        self.drafter = drafter
        self.budget: NodeBudget = budget
        self.max_batch_size = max_batch_size
        self.pace = FixedPace(prefill_chunk) if isinstance(prefill_chunk, int) else prefill_chunk
        self._grammars = grammars
        self._reading_order = ReadingOrder()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, _Running] = {}
        self._submitted: dict[Sequence, _Running] = {}
        self._verifiers: dict[str, Verifier] = {}

    @property
    def has_work(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that rounds advance."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one of those to end."""
        return len(self._waiting)

    def submit(
        self,
        sequence: Sequence,
        *,
        verifier: str | None = None,
        drafter: str | None = None,
        former: Sequence | None = None,
        keeps_cache: bool = False,
    ) -> None:
        """Queue a sequence.

        Args:
            sequence: a new one.
            verifier: registered name; by default `greedy` at temperature 0 and `sampling` above.
            drafter: of several that are loaded (`SwitchingDrafter`); by default their first.
            former: finished sequence submitted with `keeps_cache`, whose cache is reused as far as the tokens
                agree.
            keeps_cache: keep keys and values after the end, for a later `former`, until `release`.
        """
        name = verifier or ("greedy" if sequence.parameters.is_greedy else "sampling")
        if name not in self._verifiers:
            self._verifiers[name] = verifier_class(name)()
        self._verifiers[name].check(sequence)
        processors = build_processors(sequence, self.target.vocab_size, self.target.device, self._grammars)
        if drafter is not None:
            self._assign(sequence, drafter)
        # Only now can nothing be refused any more.
        if former is not None:
            self.target.adopt(sequence, former)
            self.drafter.release(former)
        self._submitted[sequence] = _Running(name, processors, keeps_cache)
        self._waiting.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence at any time: cancelled, or finished with its cache kept."""
        if sequence in self._submitted:
            self._waiting.remove(sequence)
            del self._submitted[sequence]
        self._running.pop(sequence, None)
        self.target.release(sequence)
        self.drafter.release(sequence)
        for verifier in self._verifiers.values():
            verifier.release(sequence)

    def round(self) -> list[RoundOutcome]:
        """Advance every running sequence once.

        Returns:
            One outcome per sequence that emitted tokens; sequences still inside a long prompt emit none, nor
            do those that were let go (`Sequence.error`).
        """
        return [outcome for outcomes in self.steps() for outcome in outcomes]

    def steps(self) -> Iterator[list[RoundOutcome]]:
        """One round, forward by forward: what a forward brought can be sent while the next one runs.

        Between forwards sequences may be submitted and released; those that were submitted wait for the next
        round.
        """
        while self._waiting and len(self._running) < self.max_batch_size:
            sequence = self._waiting.popleft()
            self._running[sequence] = self._submitted.pop(sequence)
        pending = {s: self._num_pending(s) for s in self._running}
        decoding = [s for s, num_pending in pending.items() if not num_pending]
        groups = self._reading_order.groups(
            {s: n for s, n in pending.items() if n}, self.pace, pads_rows=self.target.pads_rows
        )
        if groups and not self.target.pads_rows:
            # One forward more of the weights is saved, and nobody computes rows for the others' prompts.
            groups[-1] = [*groups[-1], *decoding]
        else:
            groups.append(decoding)
        for group in groups:
            present = [s for s in group if s in self._running]
            if present:
                yield self._step(present)

    @torch.inference_mode()
    def _step(self, group: list[Sequence]) -> list[RoundOutcome]:
        """One forward, and the end of those that it finished, or that cannot go on (`Sequence.error`)."""
        outcomes = self._advance(group)
        for outcome in outcomes:
            if outcome.sequence.is_finished:
                self._finish(outcome.sequence)
        for sequence in group:
            if sequence.error is not None:
                self.release(sequence)
        return outcomes

    def _assign(self, sequence: Sequence, drafter: str) -> None:
        """Let a sequence be drafted for by one of several."""
        if not isinstance(self.drafter, SwitchingDrafter):
            raise RequestError(f"drafter {drafter!r} was asked for, but only one is loaded: leave it out")
        self.drafter.assign(sequence, drafter)

    def _num_pending(self, sequence: Sequence) -> int:
        """Committed tokens in front of the root that are not cached yet."""
        return len(sequence) - 1 - self.target.cached_len(sequence)

    def _ends(self, sequence: Sequence) -> bool:
        """Whether the next forward reads all that is pending."""
        num_pending = self._num_pending(sequence)
        return self.pace.take(num_pending) == num_pending

    def _advance(self, group: list[Sequence]) -> list[RoundOutcome]:
        """Draft, forward and verify one group; prompt chunks that are not the last only fill the cache."""
        started = perf_counter()
        complete = [s for s in group if self._ends(s)]
        trees = self._draft(complete)
        drafted = perf_counter()
        segments = [self._segment(s, trees.get(s)) for s in group]
        output = self.target.forward(segments, self.drafter.required_features)
        logits = output.tree_logits() if complete else None
        forwarded = perf_counter()
        kept = self._verify(complete, trees, logits) if logits is not None else {}
        verified = perf_counter()
        # The rows of those that cannot go on are nobody's any more.
        places = [place for place, s in enumerate(group) if s.error is None]
        served = [group[place] for place in places]
        trimmed: list[VerifyResult | None] = [self._accept(s, kept.get(s)) for s in served]
        for sequence, result in zip(served, trimmed, strict=True):
            if result is not None:
                self.target.commit(sequence, result)
        if served:
            self.drafter.observe(output.part(places), trimmed)
        accepted = {s: result for s, result in zip(served, trimmed, strict=True) if result is not None}
        if logits is not None:
            self._record_log_probs(complete, trees, logits, accepted)
        timing = RoundTiming(
            draft_seconds=drafted - started,
            forward_seconds=forwarded - drafted,
            verify_seconds=verified - forwarded,
            commit_seconds=perf_counter() - verified,
            num_sequences=len(group),
            num_rows=output.hidden.shape[0],
        )
        num_prompt_tokens = sum(len(segment.prefix_ids) for segment in segments)
        if num_prompt_tokens:
            # Those that decode beside it take their share.
            share = num_prompt_tokens / timing.num_rows
            self.pace.observe(num_prompt_tokens, share * (perf_counter() - started))
        if any(map(self._can_draft, accepted)):
            self.budget.observe([trees[s] for s in accepted], list(accepted.values()), timing)
        return [RoundOutcome(s, trees[s], result, timing) for s, result in accepted.items()]

    def _draft(self, sequences: list[Sequence]) -> dict[Sequence, DraftTree]:
        """Trees to verify, cut to legal tokens and to the room that each sequence has left."""
        if not sequences:
            return {}
        plain = {s: DraftTree.root_only(s.last_token_id) for s in sequences}
        drafting = [s for s in sequences if self._can_draft(s)]
        if not drafting:
            return plain
        cached_len = sum(map(self.target.cached_len, sequences)) / len(sequences)
        num_nodes = self.budget.allot(len(sequences), cached_len)
        if num_nodes == 0:
            return plain
        proposed = dict(zip(drafting, self.drafter.propose(drafting, num_nodes), strict=True))
        legal = [
            # A path of depth d emits up to d + 1 tokens.
            _cut(tree.without_tokens_from(self.target.vocab_size).clamp_depth(sequence.room - 1), sequence)
            for sequence, tree in (plain | proposed).items()
        ]
        for sequence, tree in zip(sequences, legal, strict=True):
            if int(tree.token_ids[0]) != sequence.last_token_id:
                raise ShapeError(
                    f"the root of a draft tree is token {int(tree.token_ids[0])}, the sequence ends in "
                    f"{sequence.last_token_id}: the drafter fell out of step"
                )
        return dict(zip(sequences, self.budget.prune(legal, cached_len), strict=True))

    def _can_draft(self, sequence: Sequence) -> bool:
        """Whether anything can come of asking; if not, its rounds say nothing about whether drafting pays."""
        drafter = self.drafter
        if isinstance(drafter, SwitchingDrafter):
            drafter = drafter.part_of(sequence)
        return sequence.max_draft_tokens != 0 and type(drafter) is not NoDrafter

    def _segment(self, sequence: Sequence, tree: DraftTree | None) -> Segment:
        """Uncached prompt tokens, then the tree when the whole prompt fits."""
        start = self.target.cached_len(sequence)
        num_pending = len(sequence) - 1 - start
        if num_pending == 0:
            return Segment(sequence, (), tree)
        prefix = sequence.token_ids[start : start + self.pace.take(num_pending)]
        return Segment(sequence, tuple(prefix), tree)

    def _verify(
        self, sequences: list[Sequence], trees: dict[Sequence, DraftTree], logits: Tensor
    ) -> dict[Sequence, VerifyResult]:
        """Process the logits of every node, then let each sequence's verifier keep a path.

        `logits` itself stays as the target computed it: log-probabilities are read from it later. A sequence
        that cannot be served any further gets no result; `Sequence.error` says why.
        """
        starts = _starts([len(trees[s]) for s in sequences])
        processed = logits
        for sequence, start in zip(sequences, starts, strict=False):
            processors = self._running[sequence].processors
            if not processors:
                continue
            if processed is logits:
                processed = logits.to(torch.float32, copy=True)
            rows = processed[start : start + len(trees[sequence])]
            try:
                for processor in processors:
                    processor.apply(rows, trees[sequence], sequence)
            except RequestError as error:
                sequence.error = error
        by_verifier: dict[str, list[int]] = {}
        for index, sequence in enumerate(sequences):
            if sequence.error is None:
                by_verifier.setdefault(self._running[sequence].verifier, []).append(index)
        results: dict[Sequence, VerifyResult] = {}
        for name, indices in by_verifier.items():
            chosen = [sequences[i] for i in indices]
            part = processed
            if len(chosen) < len(sequences):
                part = torch.cat([processed[starts[i] : starts[i + 1]] for i in indices])
            verdicts = self._verifiers[name].verify([trees[s] for s in chosen], part, chosen)
            results.update(zip(chosen, verdicts, strict=True))
        return results

    def _accept(self, sequence: Sequence, result: VerifyResult | None) -> VerifyResult | None:
        """Add the kept tokens to the sequence and to its processors' history."""
        if result is None:
            return None
        trimmed = sequence.accept(result)
        for processor in self._running[sequence].processors:
            processor.extend(trimmed.emitted_ids)
        return trimmed

    def _record_log_probs(
        self,
        sequences: list[Sequence],
        trees: dict[Sequence, DraftTree],
        logits: Tensor,
        results: Mapping[Sequence, VerifyResult],
    ) -> None:
        """Append the target's own log-probability of every emitted token, where a request asks for it."""
        starts = _starts([len(trees[s]) for s in sequences])
        for sequence, start in zip(sequences, starts, strict=False):
            num_top = sequence.parameters.logprobs
            result = results.get(sequence)
            if num_top is not None and result is not None:
                rows = torch.tensor(result.rows, device=logits.device) + start
                sequence.log_probs += token_log_probs(logits[rows], result.emitted_ids, num_top)

    def _finish(self, sequence: Sequence) -> None:
        """Stop advancing a sequence; free its cache unless it was asked to stay."""
        if self._running[sequence].keeps_cache:
            del self._running[sequence]
        else:
            self.release(sequence)


def _cut(tree: DraftTree, sequence: Sequence) -> DraftTree:
    """The tree, of no more nodes than its request wants."""
    most = sequence.max_draft_tokens
    return tree if most is None or most >= tree.num_draft_tokens else tree.take(most)


def _starts(lengths: list[int]) -> list[int]:
    """First row of each part, and the total at the end."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
