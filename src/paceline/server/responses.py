"""What clients get: OpenAI's bodies and stream chunks, with the speculative figures beside the usage.

Both endpoints answer with the same parts in other words; `ChatWording` and `CompletionWording` know those.
Bodies are plain dictionaries: they are made once a round, and go straight into JSON.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from paceline.engine.generator import GenerationResult
from paceline.sequence import TokenLogProb
from paceline.server.token_text import TokenTexts
from paceline.server.tool_calls import Call

Json = dict[str, Any]


class Wording(Protocol):
    """How an endpoint puts things."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def choice(
        self, index: int, text: str, reason: str | None, log_probs: Json | None, calls: Seq[Call]
    ) -> Json:
        """A finished choice."""

    def delta(
        self, index: int, text: str, reason: str | None, log_probs: Json | None, calls: Seq[Json]
    ) -> Json:
        """A piece of one."""

    def log_probs(self, tokens: Seq[TokenLogProb], num_top: int, texts: TokenTexts, offset: int) -> Json:
        """Log-probabilities of tokens whose text begins `offset` characters into the answer."""


class ChatWording:
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def choice(
        self, index: int, text: str, reason: str | None, log_probs: Json | None, calls: Seq[Call]
    ) -> Json:
        """See `Wording`."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text.strip() or None
            message["tool_calls"] = [call.as_dict() for call in calls]
        return {"index": index, "message": message, "logprobs": log_probs, "finish_reason": reason}

    def delta(
        self, index: int, text: str, reason: str | None, log_probs: Json | None, calls: Seq[Json]
    ) -> Json:
        """See `Wording`."""
        delta: Json = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = list(calls)
        return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": reason}

    def log_probs(
        self,
        tokens: Seq[TokenLogProb],
        num_top: int,
        texts: TokenTexts,
        offset: int,
    ) -> Json:
        """See `Wording`."""

        def entry(token_id: int, log_prob: float) -> Json:
            return {"token": texts.text(token_id), "logprob": log_prob, "bytes": texts.bytes(token_id)}

        content = []
        for token in tokens:
            top = list(token.top.items())[:num_top]
            content.append(
                entry(token.token_id, token.log_prob) | {"top_logprobs": [entry(*one) for one in top]}
            )
        return {"content": content, "refusal": None}


class CompletionWording:
    """`/v1/completions`."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def choice(
        self, index: int, text: str, reason: str | None, log_probs: Json | None, calls: Seq[Call]
    ) -> Json:
        """See `Wording`."""
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": reason}

    def delta(
        self, index: int, text: str, reason: str | None, log_probs: Json | None, calls: Seq[Json]
    ) -> Json:
        """See `Wording`."""
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": reason}

    def log_probs(self, tokens: Seq[TokenLogProb], num_top: int, texts: TokenTexts, offset: int) -> Json:
        """See `Wording`."""
        names = [texts.text(token.token_id) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [
                {texts.text(i): value for i, value in list(token.top.items())[:num_top]} for token in tokens
            ],
            "text_offset": offsets,
        }


class Envelope:
    """What all parts of one answer share.

    Args:
        wording: of the endpoint.
        model: name under which the model is served.
    """

    def __init__(self, wording: Wording, model: str) -> None:
        self.wording = wording
        self.id = f"{wording.id_prefix}-{secrets.token_hex(12)}"
        self._model, self._created = model, int(time.time())

    def body(self, choices: Seq[Json], usage: Json) -> Json:
        """A whole answer."""
        return self._with(self.wording.kind, {"choices": list(choices), "usage": usage})

    def chunk(self, choices: Seq[Json], usage: Json | None = None) -> Json:
        """A piece of a stream."""
        fields: Json = {"choices": list(choices)}
        return self._with(self.wording.chunk_kind, fields if usage is None else fields | {"usage": usage})

    def _with(self, kind: str, fields: Json) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model} | fields


def usage_of(results: Seq[GenerationResult], num_prompts: int, drafter: str) -> Json:
    """Counts of a request, over all its choices.

    Args:
        results: of the choices; those of one prompt share its tokens.
        num_prompts: different prompts among them.
        drafter: that was used.
    """
    per_prompt = max(1, len(results) // max(1, num_prompts))
    num_prompt_tokens = sum(result.prompt_len for result in results[::per_prompt])
    num_output_tokens = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "paceline": _speculation(results, drafter),
    }


def _speculation(results: Seq[GenerationResult], drafter: str) -> Json:
    """Speculative figures of a request."""
    all_ = [result.statistics for result in results]
    num_rounds = sum(one.num_rounds for one in all_)
    num_draft_tokens = sum(one.num_draft_tokens for one in all_)
    num_accepted = sum(one.num_accepted_tokens for one in all_)
    num_output = sum(one.num_output_tokens for one in all_)
    seconds = max((one.seconds for one in all_), default=0.0)
    return {
        "drafter": drafter,
        "num_rounds": num_rounds,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted,
        "mean_acceptance_length": num_output / num_rounds if num_rounds else 0.0,
        "acceptance_rate": num_accepted / num_draft_tokens if num_draft_tokens else 0.0,
        "num_relaxed_tokens": sum(one.num_relaxed_tokens for one in all_),
        "regret_spent": sum(one.regret_spent for one in all_),
        "seconds": seconds,
        "tokens_per_second": num_output / seconds if seconds else 0.0,
    }
