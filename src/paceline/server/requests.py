"""From a request to what the engine is asked: prompt ids, parameters, drafter, verifier."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from paceline.engine.generator import Generator
from paceline.errors import PacelineError
from paceline.grammar import Grammar
from paceline.registry import verifier_class, verifier_names
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters
from paceline.server.errors import bad_request, refused
from paceline.server.protocol import (
    MAX_STOPS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    NamedTool,
    PacelineOptions,
    ResponseFormat,
    ToolCall,
)
from paceline.server.refusals import refuse_unserved
from paceline.server.tool_calls import ToolFormat, forced_call

COMPLETION_TOKENS = 16
"""Of `/v1/completions` when nothing is said, as OpenAI's API has it; chats may fill the context."""
TRACED_ALTERNATIVES = 4
DISABLED_TOP_K = -1


@dataclass(frozen=True, slots=True)
class Question:
    """One choice of one request, ready for the engine.

    Attributes:
        prompt_ids: the prompt.
        parameters: how to answer it.
        drafter: name, or None for the server's default.
        verifier: name, or None for the one that fits the temperature.
        max_draft_tokens: most drafted nodes a round, or None.
        keeps_prefix: whether the cache is worth keeping for a later turn.
        choice: number among the choices of its prompt.
    """

    prompt_ids: tuple[int, ...]
    parameters: SamplingParameters
    drafter: str | None
    verifier: str | None
    max_draft_tokens: int | None
    keeps_prefix: bool
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """A request, ready for the engine.

    Attributes:
        questions: one for each choice.
        deadline_seconds: given up after so long; None: never.
        shown_log_probs: alternatives that the client asked for beside each token; None: no log-probabilities.
        traced: whether rounds are reported.
        tool_format: how calls of tools are read out of the text; None where none may be made.
    """

    questions: tuple[Question, ...]
    deadline_seconds: float | None
    shown_log_probs: int | None
    traced: bool
    tool_format: ToolFormat | None = None


def chat_work(request: ChatCompletionRequest, generator: Generator) -> Work:
    """Read a request for the next turn of a conversation.

    Raises:
        ApiError: a field cannot be honoured.
    """
    refuse_unserved(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs is given without logprobs: true", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise bad_request("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
    tools = _tools(request, generator)
    with_tools = (
        None if tools is None else [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    )
    prompt_ids = _chat_prompt([_message(m) for m in request.messages], generator, with_tools)
    shown = (request.top_logprobs or 0) if request.logprobs else None
    grammar = _grammar(request.response_format)
    if tools is not None and grammar is not None:
        raise bad_request(
            "response_format leaves no place for calls of tools: give one of them, or tool_choice: none",
            param="response_format",
        )
    if tools is not None:
        grammar = tools.forced
    length = {"max_new_tokens": request.max_completion_tokens or request.max_tokens}
    parameters = _parameters(request, generator, length, shown, grammar)
    return _work(request, [prompt_ids], parameters, shown, None if tools is None else tools.format)


def completion_work(request: CompletionRequest, generator: Generator) -> Work:
    """Read a request to go on from a text.

    Raises:
        ApiError: a field cannot be honoured.
    """
    refuse_unserved(request)
    prompt = request.prompt
    prompts: Seq[str | list[int]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif isinstance(prompt[0], str):
        prompts = [text for text in prompt if isinstance(text, str)]
    else:
        prompts = [[i for i in prompt if isinstance(i, int)]]
    ids = [tuple(generator.encode(one, raw=True)) for one in prompts]
    length = {"max_new_tokens": request.max_tokens or COMPLETION_TOKENS}
    parameters = _parameters(request, generator, length, request.logprobs, None)
    return _work(request, ids, parameters, request.logprobs, None)


def _work(
    request: ChatCompletionRequest | CompletionRequest,
    prompts: Seq[tuple[int, ...]],
    parameters: SamplingParameters,
    shown: int | None,
    tool_format: ToolFormat | None,
) -> Work:
    """A question for every prompt and choice."""
    own = request.paceline
    _check_names(own)
    width = None if own.num_speculative_tokens == "auto" else own.num_speculative_tokens
    questions = [
        Question(
            prompt_ids=ids,
            parameters=parameters.updated({"seed": _choice_seed(parameters.seed, choice)}),
            drafter="none" if width == 0 else own.drafter,
            verifier=own.verifier,
            max_draft_tokens=width or None,
            # Traced requests are compared with each other: all of them start cold.
            keeps_prefix=isinstance(request, ChatCompletionRequest) and not own.trace,
            choice=choice,
        )
        for ids in prompts
        for choice in range(request.n or 1)
    ]
    return Work(tuple(questions), own.deadline_seconds, shown, own.trace, tool_format)


def _check_names(own: PacelineOptions) -> None:
    """Refuse verifiers that do not exist; drafters are checked against those that are loaded."""
    if own.verifier is not None and own.verifier not in verifier_names():
        raise bad_request(
            f"verifier {own.verifier!r} is unknown: choose one of {', '.join(verifier_names())}",
            param="paceline.verifier",
        )


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """Seed of one of several choices: the request's own for the first, others that follow from it."""
    if seed is None or choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{choice}".encode()).digest()[:7], "big")


def _parameters(
    request: ChatCompletionRequest | CompletionRequest,
    generator: Generator,
    length: Mapping[str, int | None],
    shown: int | None,
    grammar: Grammar | None,
) -> SamplingParameters:
    """The model's own defaults, changed by what the request says."""
    if len(request.stops) > MAX_STOPS:
        raise bad_request(f"stop has {len(request.stops)} strings: at most {MAX_STOPS}", param="stop")
    changes: dict[str, object] = dict(length)
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0 if request.top_k == DISABLED_TOP_K else request.top_k,
        "min_p": request.min_p,
        "seed": request.seed,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "min_new_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "include_stop_string": request.include_stop_str_in_output,
        "stop": request.stops or None,
        "grammar": grammar,
        "relaxation": _relaxation(request.paceline, generator),
    }
    changes |= {name: value for name, value in given.items() if value is not None}
    defaults = generator.default_parameters
    if request.logit_bias:
        changes["logit_bias"] = {**defaults.logit_bias, **_biases(request.logit_bias)}
    if request.stop_token_ids is not None:
        # As vLLM has it: `ignore_eos` is about the model's own ends, not about these.
        own = () if request.ignore_eos else sorted(generator.eos_token_ids)
        changes |= {"eos_token_ids": (*own, *request.stop_token_ids), "ignore_eos": False}
    num_shown = shown if shown is not None else (TRACED_ALTERNATIVES if request.paceline.trace else None)
    if num_shown is not None:
        changes["logprobs"] = num_shown
    try:
        return defaults.updated(changes)
    except PacelineError as error:
        raise refused(error) from None


def _relaxation(own: PacelineOptions, generator: Generator) -> Relaxation | None:
    """Limits of lossy verifiers, if any are given."""
    if own.relaxation is None:
        return None
    verifier = own.verifier or generator.verifier
    if verifier is None or not getattr(verifier_class(verifier), "limits", ()):
        raise bad_request(
            "paceline.relaxation is given and the verifier is lossless: name a lossy one (budgeted, typical "
            "or margin) in paceline.verifier",
            param="paceline.relaxation",
        )
    changes = own.relaxation.model_dump(exclude_none=True)
    preset = changes.pop("preset", None)
    try:
        base = Relaxation() if preset is None else Relaxation.preset(preset)
        return base.updated(changes)
    except PacelineError as error:
        raise refused(error) from None


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Token ids in texts, as JSON has them, to numbers."""
    bad = next((key for key in given if not key.isdecimal()), None)
    if bad is not None:
        raise bad_request(f"logit_bias names token {bad[:40]!r}: keys are token ids", param="logit_bias")
    return {int(key): amount for key, amount in given.items()}


def _grammar(wanted: ResponseFormat | None) -> Grammar | None:
    """What the answer has to look like."""
    if wanted is None:
        return None
    if wanted.json_schema is not None and wanted.type != "json_schema":
        raise bad_request(
            f"response_format has a json_schema and type {wanted.type!r}: the type must be 'json_schema'",
            param="response_format",
        )
    if wanted.type == "text":
        return None
    try:
        if wanted.type == "json_object":
            return Grammar.json_object()
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise bad_request(
                "response_format json_schema needs json_schema.schema: give the schema",
                param="response_format",
            )
        return Grammar.json_schema(wanted.json_schema.schema_)
    except PacelineError as error:
        raise refused(error) from None


@dataclass(frozen=True, slots=True)
class _Tools:
    """How tools are called; `forced` holds the answer to a call."""

    format: ToolFormat
    forced: Grammar | None


def _tools(request: ChatCompletionRequest, generator: Generator) -> _Tools | None:
    """What calls look like, where the request allows any."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, and no tools are given", param="tool_choice")
        return None
    if choice == "none":
        return None
    found = ToolFormat.of(generator.tokenizer)
    if found is None:
        raise bad_request("this model's chat template has no place for tools: leave tools out", param="tools")
    functions = {tool.function.name: tool.function.parameters for tool in request.tools}
    if choice in (None, "auto"):
        strict = next((tool.function.name for tool in request.tools if tool.function.strict), None)
        if strict is not None:
            raise bad_request(
                f"function {strict!r} is strict, which only a forced call is: use tool_choice required, or "
                "name the function",
                param="tools",
            )
        return _Tools(found, None)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in functions:
            raise bad_request(
                f"tool_choice names {name!r}, which is not one of the tools", param="tool_choice"
            )
        functions = {name: functions[name]}
    try:
        return _Tools(found, forced_call(found, functions))
    except PacelineError as error:
        raise refused(error) from None


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates take it."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise bad_request(f"a message of role {message.role} has no content", param="messages")
    # Templates know the older name of OpenAI's role.
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls:
        found["tool_calls"] = [_former_call(call) for call in message.tool_calls]
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _former_call(call: ToolCall) -> dict[str, Any]:
    """A call of an earlier turn; templates write the arguments as JSON themselves."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(
            f"the arguments of call {call.id[:40]!r} are not a JSON object: they must be the ones that were "
            "answered",
            param="messages",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _chat_prompt(
    messages: Seq[Mapping[str, Any]], generator: Generator, tools: Seq[Mapping[str, Any]] | None
) -> tuple[int, ...]:
    """Ids of the conversation."""
    try:
        return tuple(generator.encode_chat(messages, tools=tools))
    except PacelineError as error:
        raise refused(error) from None
    except Exception as error:
        # Templates raise what they like for conversations that they do not know.
        raise bad_request(
            f"the model's chat template refuses this conversation: {' '.join(str(error).split())[:200]}",
            param="messages",
        ) from None
