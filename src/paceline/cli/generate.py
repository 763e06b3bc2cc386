"""`paceline generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from paceline.cli.console import notice, summary
from paceline.cli.option_groups import expand_options
from paceline.cli.options import ModelOptions, SamplingOptions
from paceline.cli.relaxation_options import RelaxationOptions
from paceline.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from paceline.engine.generator import GenerationResult, Generator
    from paceline.sampling import SamplingParameters


@expand_options
def generate(
    prompt: Annotated[str, Argument(help="The prompt; - reads it from standard input.")],
    model: ModelOptions,
    sampling: SamplingOptions,
    lossy: RelaxationOptions,
    raw: Annotated[bool, Option("--raw", help="Do not wrap the prompt in the chat template.")] = False,
    stream: Annotated[bool, Option("--stream", help="Print the answer while it grows.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer one prompt."""
    if stream and as_json:
        raise ConfigError(
            "--stream and --json were both given: a JSON object is printed in one piece, choose one"
        )
    sampling.check()
    lossy.relaxation()
    text = read_prompt(prompt, raw=raw)
    generator = model.load()
    parameters = lossy.applied(sampling.parameters(generator), generator)
    if not raw and not generator.has_chat_template:
        notice("notice: this model has no chat template, so the prompt is taken as it is (as with --raw)")
    if stream:
        result = print_stream(generator, text, parameters, raw=raw)
    else:
        result = generator.generate(text, parameters, raw=raw)
        print(json.dumps(as_object(result), ensure_ascii=False) if as_json else result.text)
    if not as_json:
        notice(summary(result.statistics))


def read_prompt(prompt: str, *, raw: bool) -> str:
    """The prompt itself, or standard input (without its final newline) for `-`.

    Raises:
        RequestError: it is empty; a chat template would hide that, and the model answer nothing.
    """
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not raw and not text.strip():
        raise RequestError("the prompt is empty: give a text, or '-' to read one from standard input")
    return text


def print_stream(
    generator: Generator, prompt: str, parameters: SamplingParameters, *, raw: bool
) -> GenerationResult:
    """Print the answer round by round; returns the finished result."""
    result = None
    for event in generator.stream(prompt, parameters, raw=raw):
        print(event.text, end="", flush=True)
        result = event.result
    print()
    if result is None:
        raise ConfigError("the answer ended without a result: the engine was stopped from outside")
    return result


def as_object(result: GenerationResult) -> Mapping[str, object]:
    """The result as one flat JSON object; log-probabilities appear only when they were asked for."""
    log_probs = (
        {} if result.log_probs is None else {"log_probs": [asdict(entry) for entry in result.log_probs]}
    )
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "prompt_len": result.prompt_len,
        **result.statistics.as_dict(),
        **log_probs,
    }
