"""A server over a tiny model, on a free port of this machine, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import uvicorn

from paceline.drafters.none import NoDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.drafters.switching import SwitchingDrafter
from paceline.engine.generator import Generator
from paceline.engine.prefill import TimedPace
from paceline.server.app import ServerOptions, create_app
from paceline.server.metrics import ServerMetrics
from paceline.server.running import Server, ServerSettings
from paceline.server.scheduler import Scheduler

MODEL = "tiny"


@dataclass(frozen=True)
class LiveServer:
    url: str
    generator: Generator
    scheduler: Scheduler
    server: uvicorn.Server
    thread: threading.Thread

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.generator.engine.has_work or self.scheduler._jobs:
            assert time.monotonic() < deadline, "the engine still works"
            time.sleep(0.01)


def tiny_generator(target, tokenizer, drafter=None, **settings) -> Generator:
    parts = {"prompt_lookup": PromptLookupDrafter(), "none": NoDrafter(), **(drafter or {})}
    default = next(iter(drafter)) if drafter else "prompt_lookup"
    return Generator(
        target, tokenizer, SwitchingDrafter(parts, default), eos_token_ids=[2], prefill_chunk=TimedPace(0.02),
        **{"num_speculative_tokens": 16, "max_batch_size": 8, **settings},
    )  # fmt: skip


def start(
    generator: Generator, *, model: str = MODEL, max_queue: int = 64, prefix_tokens: int = 512, **options
) -> LiveServer:
    bound = Server.bound(ServerSettings(port=0))
    scheduler = Scheduler(generator, ServerMetrics(), max_queue=max_queue, prefix_tokens=prefix_tokens)
    app = create_app(scheduler, ServerOptions(model, generator.drafter.names, **options))
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound._listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        assert thread.is_alive(), "the server ended"
        time.sleep(0.01)
    return LiveServer(f"http://127.0.0.1:{bound.port}", generator, scheduler, server, thread)
