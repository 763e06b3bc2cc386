"""Fixtures shared by all tests: tiny models and their oracles, made once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.drafters.none import NoDrafter
from paceline.drafters.phrase_trees import phrase_embeddings
from paceline.engine.generator import Generator
from paceline.heads.checkpoint import save_head
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle_folder import LoadedEagle, save_eagle
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import greedy_oracle, tiny_model, tiny_tokenizer
from paceline.vocabularies.chains import padded_token_ids
from paceline.vocabularies.phrases import PhraseVocabulary
from paceline.vocabularies.speculative import VocabularyRanking

ROOT = Path(__file__).parent.parent
PROMPTS = ([7], [5, 6, 7, 8, 9], [(11 * i * i + 3 * i) % 93 + 3 for i in range(37)])


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> Iterator[None]:
    """Tiny models run slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _own_cache() -> Iterator[None]:
    """Converted targets, compiled kernels and measured costs stay in the repository's build folder."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("PACELINE_CACHE_DIR"):
            patch.setenv("PACELINE_CACHE_DIR", str(ROOT / "build" / "cache"))
        yield


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
        # Room for every replayed tree; the default width is a matter of speed.
        settings.setdefault("num_speculative_tokens", 64)
        return Generator(target_of(architecture), tokenizer, drafter or NoDrafter(), **settings)

    return make


@pytest.fixture(scope="session")
def phrase_head_of(
    target_of: Callable[..., HuggingFaceTarget],
    oracle_of: Callable[..., list[int]],
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Folder of a phrase head that knows a tiny model's answers to PROMPTS nearly by heart; made once."""

    @cache
    def make(architecture: str) -> Path:
        target = target_of(architecture)
        texts = [oracle_of(architecture, tuple(prompt), 24) for prompt in PROMPTS]
        vocabulary = PhraseVocabulary.mine(texts * 2, tokenizer, num_entries=150, criterion="count")
        shape = PhraseHeadConfig(
            target.hidden_size, len(vocabulary), width=16, chain_entries=min(100, len(vocabulary))
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = PhraseHead(shape)
        _teach(head, target, vocabulary, texts)
        folder = tmp_path_factory.mktemp("heads") / architecture
        save_head(folder, head, vocabulary, {"target_fingerprint": target.fingerprint}, "A tiny head.")
        return folder

    return make


@pytest.fixture(scope="session")
def eagle_head_of(
    target_of: Callable[..., HuggingFaceTarget], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Folder of an EAGLE-3 head with random weights and all vocabularies, for a tiny model; made once."""

    @cache
    def make(architecture: str) -> Path:
        target = target_of(architecture)
        size = target.hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = EagleHead(EagleConfig("eagle3", size, size, 48, 4, 2, 8, feature_layers=(0, 1)))
            ranking = VocabularyRanking(size, target.vocab_size, 8)
        provenance = {"target_fingerprint": target.fingerprint}
        loaded = LoadedEagle(head, ranking, torch.arange(0, target.vocab_size, 2), None, provenance)
        folder = tmp_path_factory.mktemp("heads") / f"{architecture}-eagle"
        save_eagle(folder, loaded, "A tiny head.")
        return folder

    return make


def _teach(
    head: PhraseHead, target: HuggingFaceTarget, vocabulary: PhraseVocabulary, texts: list[list[int]]
) -> None:
    """Fit a head: the state before the newest token, and that token, predict the phrase behind it.

    And the step behind that phrase; what follows it is the phrase that is predicted where it ends.
    """
    inputs, labels, followers = [], [], []
    lengths = torch.tensor([len(ids) for ids in vocabulary.token_ids])
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids, first = torch.tensor([*prompt, *text]), len(prompt)
        with torch.no_grad():
            states = target.model(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
            inputs.append(head.join_inputs(states[first - 1 : -2], target.embedding(ids[first:-1])))
        own = vocabulary.label(text)
        ends = torch.arange(len(own)) + lengths[own]
        behind = torch.where(ends < len(own), own[ends.clamp(max=len(own) - 1)], -1)
        labels.append(own[1:])
        followers.append(behind.clamp(max=head.config.chain_entries)[1:])
    entries = torch.cat(labels)
    padded = padded_token_ids(vocabulary.token_ids)
    with torch.no_grad():
        phrases = phrase_embeddings(target.embedding(padded[entries]), lengths[entries])
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(120):
        optimizer.zero_grad()
        scores, behind_scores = head(torch.cat(inputs), *phrases)
        loss = torch.nn.functional.cross_entropy(scores, entries, ignore_index=-1)
        loss = loss + torch.nn.functional.cross_entropy(behind_scores, torch.cat(followers), ignore_index=-1)
        loss.backward()
        optimizer.step()
    head.eval()


@pytest.fixture(scope="session")
def smollm2() -> Generator:
    """The default target in fp32, drafting nothing; converted once, into the repository's build folder."""
    import paceline

    return paceline.load("smollm2", drafter="none", dtype="fp32", device="cpu", keep_model=True)
