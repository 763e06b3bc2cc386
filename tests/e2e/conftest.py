"""One live server over a tiny model for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the server's packages are not installed: pip install paceline[serve]")

from e2e.live_server import LiveServer, start, tiny_generator


@pytest.fixture(scope="session")
def live(target_of, tokenizer, phrase_head_of) -> Iterator[LiveServer]:
    from paceline.drafters.phrase import PhraseDrafter

    target = target_of("llama")
    phrase = PhraseDrafter.build(target, phrase_head_of("llama"), 16)
    running = start(tiny_generator(target, tokenizer, {"phrase": phrase}))
    yield running
    running.stop()
    assert not running.thread.is_alive(), "the server ends when it is told to"


@pytest.fixture(scope="session")
def solo(target_of, tokenizer):
    """What one request alone gets from the engine, plainly decoded."""
    from paceline.drafters.none import NoDrafter
    from paceline.engine.generator import Generator

    generator = Generator(
        target_of("llama"), tokenizer, NoDrafter(), eos_token_ids=[2], num_speculative_tokens=0
    )

    def answer(prompt, **parameters):
        from paceline.sampling import SamplingParameters

        chosen = SamplingParameters(**{"max_new_tokens": 24, **parameters})
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return generator.chat(prompt, chosen)
        return generator.generate(prompt, chosen, raw=True)

    return answer
