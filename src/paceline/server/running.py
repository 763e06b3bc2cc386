"""Running a server: the socket first, so that a taken port is found out before a model is loaded."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from sse_starlette.sse import AppStatus

from paceline.drafters.switching import SwitchingDrafter
from paceline.engine.generator import Generator
from paceline.errors import ConfigError
from paceline.server.app import ServerOptions, create_app
from paceline.server.limits import MAX_BODY_BYTES
from paceline.server.logs import configure_logs
from paceline.server.metrics import ServerMetrics
from paceline.server.scheduler import Scheduler

GRACE_SECONDS = 30
"""How long answers in flight may take to end once the server is told to stop."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where a server listens, who may ask, and its limits.

    Attributes:
        host: address.
        port: 0 takes a free one.
        model_name: under which the target is served.
        keys: API keys; none lets everybody in.
        logs_prompts: whether questions are written to the log.
        max_queue: answers that may wait.
        prefix_tokens: of conversations that stay cached.
        max_body_bytes: of a request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "model"
    keys: tuple[bytes, ...] = ()
    logs_prompts: bool = False
    max_queue: int = 64
    prefix_tokens: int = 16_384
    max_body_bytes: int = MAX_BODY_BYTES


class Server:
    """A server that has its port.

    Args:
        settings: see `ServerSettings`.
        listener: bound, not listening yet.
    """

    def __init__(self, settings: ServerSettings, listener: socket.socket) -> None:
        self.settings = settings
        self._listener = listener

    @classmethod
    def bound(cls, settings: ServerSettings) -> Server:
        """Take the port.

        Raises:
            ConfigError: it is taken, or the address is not this machine's.
        """
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {settings.host} port {settings.port} ({error.strerror}): choose another "
                "--port or --host"
            ) from None
        return cls(settings, listener)

    @property
    def port(self) -> int:
        """The port that was taken."""
        return int(self._listener.getsockname()[1])

    def run(
        self,
        generator: Generator,
        *,
        num_speculative_tokens: int | str = "auto",
        on_ready: Callable[[str], None] = print,
    ) -> None:
        """Serve until SIGTERM or Ctrl-C; answers in flight are finished first."""
        settings = self.settings
        configure_logs()
        # Streams end when uvicorn ends them, after the grace period, not as soon as a signal comes.
        AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
        generator.prepare_grammars()
        drafter = generator.drafter
        scheduler = Scheduler(
            generator, ServerMetrics(), max_queue=settings.max_queue, prefix_tokens=settings.prefix_tokens
        )
        app = create_app(
            scheduler,
            ServerOptions(
                model=settings.model_name,
                drafters=drafter.names if isinstance(drafter, SwitchingDrafter) else ("default",),
                default_verifier=generator.verifier,
                num_speculative_tokens=num_speculative_tokens,
                keys=settings.keys,
                max_body_bytes=settings.max_body_bytes,
                logs_prompts=settings.logs_prompts,
            ),
        )
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_SECONDS, lifespan="on"
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        on_ready(f"serving {settings.model_name} on http://{host}:{self.port} (playground: /, API: /v1)")
        uvicorn.Server(config).run(sockets=[self._listener])
