"""Text in, text out: what `paceline.load` returns.

A `Generator` turns prompts into sequences, runs the engine until they finish and turns ids back into text.
`stream` yields what every round added; `generate` and `generate_batch` are the same loop without the events.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

from paceline.config import DEFAULT_NUM_SPECULATIVE_TOKENS
from paceline.drafters.base import DraftProposer
from paceline.engine.detokenizer import IncrementalDetokenizer
from paceline.engine.grammar import GrammarTokenizer
from paceline.engine.node_budget import NodeBudget
from paceline.engine.prefill import PREFILL_CHUNK, PrefillPace
from paceline.engine.speculate import RoundOutcome, SpeculativeEngine
from paceline.engine.stats import GenerationStatistics, StatisticsRecorder
from paceline.engine.stop_strings import StopChecker
from paceline.engine.text_decoder import TextDecoder
from paceline.errors import (
    ConfigError,
    MissingDependencyError,
    RequestError,
    UnsupportedFeatureError,
)
from paceline.sampling import SamplingParameters
from paceline.sequence import FinishReason, Sequence, TokenLogProb
from paceline.targets.base import TargetModel

Origin = Literal["drafted", "relaxed", "target"]
Prompt = str | Seq[int]
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished answer.

    Attributes:
        token_ids: emitted ids, the end-of-sequence id included.
        text: their text without special tokens; cut at a stop string.
        finish_reason: `stop` (end of sequence or stop string) or `length`.
        log_probs: one entry per id when asked for, else None.
        prompt_len: tokens of the prompt.
        statistics: rounds, acceptance and times.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    log_probs: tuple[TokenLogProb, ...] | None
    prompt_len: int
    statistics: GenerationStatistics


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one round added to one answer.

    Attributes:
        text: new text; joined over all events it is the result's text.
        token_ids: new ids.
        origins: where each id came from: an accepted draft that the target would have chosen, one that a
            lossy verifier kept although it would not, or the target itself (recovered or bonus).
        num_draft_tokens: nodes drafted in this round.
        result: set on the last event only.
        outcome: the round itself: the draft tree, what was kept of it, and times.
        log_probs: of the new ids, where the request asks for them.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    num_draft_tokens: int
    result: GenerationResult | None
    outcome: RoundOutcome
    log_probs: tuple[TokenLogProb, ...] = ()


class Generator:
    """A target, a drafter and a tokenizer, ready to answer; made by `paceline.load`.

    Args:
        target: the frozen model.
        tokenizer: its Hugging Face tokenizer.
        drafter: proposes the draft trees.
        default_parameters: used when a call gives none.
        eos_token_ids: the model's own ends.
        verifier: registered name for every request; None chooses by temperature.
        num_speculative_tokens: most drafted nodes per round; `auto` lets the node budget decide.
        max_batch_size: requests decoded at once.
        prefill_chunk: most prompt tokens of one forward, or what decides it.
    """

    def __init__(
        self,
        target: TargetModel,
        tokenizer: Any,
        drafter: DraftProposer,
        *,
        default_parameters: SamplingParameters | None = None,
        eos_token_ids: Seq[int] = (),
        verifier: str | None = None,
        num_speculative_tokens: int | str | NodeBudget = DEFAULT_NUM_SPECULATIVE_TOKENS,
        max_batch_size: int = 16,
        prefill_chunk: int | PrefillPace = PREFILL_CHUNK,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.default_parameters = default_parameters or SamplingParameters()
        self.eos_token_ids = frozenset(eos_token_ids)
        self.verifier = verifier
        self._decoder = TextDecoder(tokenizer)
        # Sequence -> its answer, as long as somebody holds the answer.
        self._answers: WeakValueDictionary[Sequence, Answer] = WeakValueDictionary()
        self.grammars = GrammarTokenizer(tokenizer, target.vocab_size)
        self.engine = SpeculativeEngine(
            target,
            drafter,
            num_speculative_tokens=num_speculative_tokens,
            max_batch_size=max_batch_size,
            prefill_chunk=prefill_chunk,
            grammars=self.grammars,
        )

    def prepare_grammars(self) -> None:
        """Get ready for requests with a grammar, which the first of them would otherwise wait for."""
        with contextlib.suppress(MissingDependencyError, UnsupportedFeatureError):
            self.grammars.prepare()

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts go through a chat template (base models have none and take them raw)."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: text, or ids that are taken as they are.
            raw: do not wrap the text as a user's turn of the chat template.
        """
        if not isinstance(prompt, str):
            return [int(token_id) for token_id in prompt]
        if raw or not self.has_chat_template:
            return [int(i) for i in self.tokenizer(prompt)["input_ids"]]
        return self.encode_chat([{"role": "user", "content": prompt}])

    def encode_chat(
        self, messages: Seq[Mapping[str, Any]], *, tools: Seq[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Args:
            messages: `{"role", "content"}` and whatever else the model's chat template reads.
            tools: functions that may be called, as OpenAI's API describes them.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template: give the conversation as one raw prompt")
        ids = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        return [int(i) for i in ids]

    def generate(
        self, prompt: Prompt, parameters: SamplingParameters | None = None, *, raw: bool = False
    ) -> GenerationResult:
        """Answer one prompt."""
        return self.generate_batch([prompt], parameters, raw=raw)[0]

    def generate_batch(
        self,
        prompts: Seq[Prompt],
        parameters: SamplingParameters | Seq[SamplingParameters] | None = None,
        *,
        raw: bool = False,
    ) -> list[GenerationResult]:
        """Answer several prompts at once; with lossless verifiers each is what the prompt alone would get.

        Args:
            prompts: texts or ids.
            parameters: one for all, or one each.
            raw: do not apply the chat template.
        """
        if parameters is None or isinstance(parameters, SamplingParameters):
            parameters = [parameters or self.default_parameters] * len(prompts)
        if len(parameters) != len(prompts):
            raise RequestError(f"{len(parameters)} parameters for {len(prompts)} prompts: give one each")
        answers: list[Answer] = []
        try:
            for prompt, own in zip(prompts, parameters, strict=True):
                answers.append(self.open(self.encode(prompt, raw=raw), own))
        except BaseException:
            # One refused request takes the others along: nobody would read their answers.
            for answer in answers:
                self.engine.release(answer.sequence)
            raise
        results: dict[int, GenerationResult] = {}
        for event in self.run(answers):
            if event.event.result is not None:
                results[event.index] = event.event.result
        return [results[i] for i in range(len(prompts))]

    def stream(
        self, prompt: Prompt, parameters: SamplingParameters | None = None, *, raw: bool = False
    ) -> Iterator[StreamEvent]:
        """Answer one prompt, an event per round; closing the iterator cancels the request."""
        answer = self.open(self.encode(prompt, raw=raw), parameters or self.default_parameters)
        for indexed in self.run([answer]):
            yield indexed.event

    def chat(self, messages: Seq[Message], parameters: SamplingParameters | None = None) -> GenerationResult:
        """Answer a conversation of `{"role", "content"}` messages."""
        return self.generate(self.encode_chat(messages), parameters)

    def open(
        self,
        prompt_ids: list[int],
        parameters: SamplingParameters,
        *,
        former: Answer | None = None,
        keeps_cache: bool = False,
        verifier: str | None = None,
        drafter: str | None = None,
        max_draft_tokens: int | None = None,
    ) -> Answer:
        """Submit one prompt to the engine (the server and the conversation build on this).

        Args:
            prompt_ids: the prompt.
            parameters: how to answer it.
            verifier: instead of the generator's.
            drafter: of several that are loaded; by default the first of them.
            max_draft_tokens: most drafted nodes a round, within what the generator drafts.
            former: finished answer, opened with `keeps_cache`, whose cache is reused as far as the ids agree.
            keeps_cache: keep the cache after the end until it is reused or released.
        """
        bad = next((i for i in prompt_ids if not 0 <= i < self.target.vocab_size), None)
        if bad is not None:
            raise RequestError(f"prompt token id {bad} is not in [0, {self.target.vocab_size})")
        eos = parameters.eos_token_ids
        unknown = next((i for i in eos or () if not 0 <= i < self.target.vocab_size), None)
        if unknown is not None:
            raise RequestError(
                f"eos_token_ids has token id {unknown}: ids of this target are 0 to "
                f"{self.target.vocab_size - 1}"
            )
        stop = parameters.stop
        checker = StopChecker(self.tokenizer, stop, self._decoder) if stop else None
        sequence = Sequence(
            prompt_ids,
            parameters,
            self.eos_token_ids if eos is None else frozenset(eos),
            self.target.context_len,
            seed=secrets.randbits(63) if parameters.seed is None else parameters.seed,
            find_stop=checker.find_stop if checker else None,
            max_draft_tokens=max_draft_tokens,
        )
        self.engine.submit(
            sequence,
            verifier=verifier or self.verifier,
            drafter=drafter,
            former=former.sequence if former else None,
            keeps_cache=keeps_cache,
        )
        answer = self._answers[sequence] = Answer(sequence, self._decoder)
        return answer

    def run(self, answers: Seq[Answer]) -> Iterator[IndexedEvent]:
        """Advance the engine until the given answers are complete; closing the iterator cancels them.

        A round advances all open answers, those of other iterators too: their events wait for their reader.

        Raises:
            RequestError: one of these answers cannot be served any further.
        """
        try:
            while True:
                for index, answer in enumerate(answers):
                    while answer.events:
                        yield IndexedEvent(index, answer.events.popleft())
                error = next((a.sequence.error for a in answers if a.sequence.error is not None), None)
                if error is not None:
                    raise error
                if all(answer.sequence.is_finished for answer in answers):
                    return
                for outcome in self.engine.round():
                    reader = self._answers.get(outcome.sequence)
                    if reader is not None:
                        reader.events.append(reader.advance(outcome))
        finally:
            for answer in answers:
                if not answer.sequence.is_finished:
                    self.engine.release(answer.sequence)


@dataclass(frozen=True, slots=True)
class IndexedEvent:
    """An event and the number of the prompt it belongs to."""

    index: int
    event: StreamEvent


class Answer:
    """An answer in the making: its sequence, its text so far and its statistics.

    Attributes:
        sequence: its decoding state.
        events: what `Generator.run` has not handed out yet.
    """

    def __init__(self, sequence: Sequence, decoder: TextDecoder) -> None:
        self.sequence = sequence
        self.events: deque[StreamEvent] = deque()
        parameters = sequence.parameters
        self._detokenizer = IncrementalDetokenizer(
            decoder, stop=parameters.stop, include_stop_string=parameters.include_stop_string
        )
        self._recorder = StatisticsRecorder()
        self._text: list[str] = []

    def advance(self, outcome: RoundOutcome) -> StreamEvent:
        """Turn a round of this answer into an event."""
        result = outcome.result
        ids = result.emitted_ids
        self._recorder.record(outcome.tree, result, outcome.timing)
        text = self._detokenizer.push(ids)
        if self.sequence.is_finished:
            text += self._detokenizer.finish()
        self._text.append(text)
        origins: list[Origin] = ["drafted"] * len(result.accepted_ids)
        origins += ["target"] * (len(ids) - len(origins))
        for token in result.relaxed:
            origins[token.place] = "relaxed"
        return StreamEvent(
            text,
            ids,
            tuple(origins),
            outcome.tree.num_draft_tokens,
            self._result() if self.sequence.is_finished else None,
            outcome,
            tuple(self.sequence.log_probs[len(self.sequence.log_probs) - len(ids) :])
            if self.sequence.log_probs
            else (),
        )

    def _result(self) -> GenerationResult:
        """The finished answer."""
        sequence = self.sequence
        reason = sequence.finish_reason
        if reason is None:
            raise ConfigError("the answer is not finished: run the engine until it is")
        return GenerationResult(
            token_ids=tuple(sequence.output_ids),
            text="".join(self._text),
            finish_reason=reason,
            log_probs=tuple(sequence.log_probs) if sequence.parameters.logprobs is not None else None,
            prompt_len=len(sequence.prompt_ids),
            statistics=self._recorder.finish(),
        )
