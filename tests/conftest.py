"""Fixtures shared by all tests: tiny models and their oracles, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import greedy_oracle, tiny_model, tiny_tokenizer

PROMPTS = ([7], [5, 6, 7, 8, 9], [(11 * i * i + 3 * i) % 93 + 3 for i in range(37)])


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> Iterator[None]:
    """Tiny models run slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def target_of() -> Callable[..., HuggingFaceTarget]:
    """Target over a tiny model, by architecture name; made once."""

    @cache
    def make(architecture: str = "llama", **settings: Any) -> HuggingFaceTarget:
        return HuggingFaceTarget(tiny_model(architecture, **settings))

    return make


@pytest.fixture(scope="session")
def oracle_of(target_of: Callable[..., HuggingFaceTarget]) -> Callable[..., list[int]]:
    """Greedy continuation of a prompt by a tiny model, decoded without a cache; made once."""

    @cache
    def make(architecture: str, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
        return greedy_oracle(target_of(architecture).model, prompt, max_new_tokens)

    return make


@pytest.fixture(scope="session")
def generator_of(target_of: Callable[..., HuggingFaceTarget], tokenizer: Any) -> Callable[..., Generator]:
    """Generator over a tiny target with any drafter."""

    def make(architecture: str = "llama", drafter: Any = None, **settings: Any) -> Generator:
        return Generator(target_of(architecture), tokenizer, drafter or NoDrafter(), **settings)

    return make
