"""What clients send: OpenAI's fields, the extensions that vLLM's clients use, and paceline's own.

A field is honoured or refused by name, never ignored: unknown ones are errors, and the known ones that are
not served may only carry the value that asks for nothing (`refusals.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CHOICES = 8
MAX_STOPS = 16
MAX_STOP_LEN = 256
MAX_BIASES = 1024
MAX_COUNT = 1 << 30
"""Of anything that is counted: larger numbers do not fit where they are computed with."""
TokenId = Annotated[int, Field(strict=True, ge=0, lt=MAX_COUNT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]


class _Strict(BaseModel):
    """Unknown fields are refused; numbers are not read from texts."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RelaxationOptions(_Strict):
    """Limits of a lossy verifier: a preset, and what differs from it.

    The fields are those of `paceline.Relaxation`.
    """

    preset: str | None = None
    risk_budget: float | None = None
    risk_budget_per_token: float | None = None
    max_regret_per_value: float | None = None
    max_relaxed_tokens_per_block: Annotated[int, Field(lt=MAX_COUNT)] | None = None
    value_horizon: Annotated[int, Field(lt=MAX_COUNT)] | None = None
    is_value_normalised: bool | None = None
    regret_price: float | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    max_regret: float | None = None


class PacelineOptions(_Strict):
    """How a request is to be sped up (`extra_body={"paceline": {...}}`).

    Attributes:
        drafter: one of those that the server has loaded; `none` switches speculation off.
        verifier: a registered one; by default `greedy` at temperature 0 and `sampling` above.
        num_speculative_tokens: most drafted nodes a round, within the server's own limit; `auto` is that.
        relaxation: limits of a lossy verifier.
        deadline_seconds: the answer is given up after so long.
        trace: report every round: draft tree, what was kept, times.
    """

    drafter: str | None = None
    verifier: str | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, lt=MAX_COUNT)] | Literal["auto"] = "auto"
    relaxation: RelaxationOptions | None = None
    deadline_seconds: Annotated[float, Field(gt=0)] | None = None
    trace: bool = False


class StreamOptions(_Strict):
    """What a stream carries beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_Strict):
    """A schema that the answer has to follow."""

    name: str = "schema"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """Structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionDefinition(_Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(_Strict):
    """Names a function."""

    name: str


class NamedTool(_Strict):
    """A tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class TextPart(_Strict):
    """A piece of a message; text is the only kind."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """A call that the model made earlier; its arguments are JSON in a text."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """One of them."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None


class _Request(_Strict):
    """What both kinds of request have in common."""

    model: str = ""
    max_tokens: Annotated[int, Field(ge=1, lt=MAX_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | list[StopString] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
    ) = None
    user: str | None = None
    # vLLM's extensions, under its names.
    top_k: Annotated[int, Field(ge=-1, lt=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=MAX_COUNT)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    paceline: PacelineOptions = PacelineOptions()

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatCompletionRequest(_Request):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=MAX_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=64)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    # Known to OpenAI's clients, and refused unless they ask for nothing.
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    service_tier: str | None = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(_Request):
    """Body of `/v1/completions`."""

    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Known to OpenAI's clients, and refused unless they ask for nothing.
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
