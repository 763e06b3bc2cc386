"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.console import notice
from paceline.cli.option_groups import expand_options
from paceline.cli.options import ModelOptions
from paceline.errors import ConfigError, MissingDependencyError

SERVER_PANEL = "Server"
LIMITS_PANEL = "Limits"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@expand_options
def serve(
    model: ModelOptions,
    other_drafter: Annotated[
        list[str] | None,
        Option(
            help="A further drafter, NAME or NAME:FOLDER, that requests may choose; may be repeated. By "
            "default prompt_lookup.",
            rich_help_panel="Model",
        ),
    ] = None,
    host: Annotated[str, Option(help="Address to listen on.", rich_help_panel=SERVER_PANEL)] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.", rich_help_panel=SERVER_PANEL)] = 8000,
    model_name: Annotated[
        str | None,
        Option(
            help="Name under which the target is served; by default its own.", rich_help_panel=SERVER_PANEL
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, Option(help="Keys that are let in, one a line.", rich_help_panel=SERVER_PANEL)
    ] = None,
    log_prompts: Annotated[
        bool, Option("--log-prompts", help="Write questions to the log.", rich_help_panel=SERVER_PANEL)
    ] = False,
    max_concurrency: Annotated[
        int, Option(help="Answers that are decoded at once.", rich_help_panel=LIMITS_PANEL)
    ] = 8,
    max_queue: Annotated[
        int, Option(help="Answers that may wait; further ones get status 429.", rich_help_panel=LIMITS_PANEL)
    ] = 64,
    prefix_tokens: Annotated[
        int,
        Option(
            help="Tokens of conversations that stay cached for the next turn.", rich_help_panel=LIMITS_PANEL
        ),
    ] = 16_384,
    prefill_seconds: Annotated[
        float,
        Option(help="About how long a piece of a prompt may hold up others.", rich_help_panel=LIMITS_PANEL),
    ] = 0.015,
    max_body_bytes: Annotated[int, Option(help="Of a request.", rich_help_panel=LIMITS_PANEL)] = 4 << 20,
) -> None:
    """Serve the model over HTTP, as OpenAI's API does; a playground is at /."""
    for name, value, least in (
        ("--max-concurrency", max_concurrency, 1),
        ("--max-queue", max_queue, 0),
        ("--prefix-tokens", prefix_tokens, 0),
        ("--max-body-bytes", max_body_bytes, 1024),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}: it must be at least {least}")
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port is {port}: it must be between 0 and 65535")
    try:
        from paceline.server.limits import read_keys
        from paceline.server.running import Server, ServerSettings
    except ImportError as error:
        raise MissingDependencyError(
            f"the server needs the package {error.name}, which is not installed: "
            'pip install "paceline[serve]"'
        ) from error

    keys = () if api_key_file is None else read_keys(api_key_file)
    if host not in LOOPBACK and not keys:
        notice(f"notice: {host} can be reached from outside, and no --api-key-file is given: anybody may ask")
    settings = ServerSettings(
        host=host,
        port=port,
        model_name=model_name or Path(model.target).name,
        keys=keys,
        logs_prompts=log_prompts,
        max_queue=max_queue,
        prefix_tokens=prefix_tokens,
        max_body_bytes=max_body_bytes,
    )
    server = Server.bound(settings)
    generator = model.load(
        other_drafters=tuple(other_drafter or ("prompt_lookup",)),
        max_batch_size=max_concurrency,
        prefill_seconds=prefill_seconds,
    )
    server.run(generator, num_speculative_tokens=model.num_speculative_tokens, on_ready=notice)
