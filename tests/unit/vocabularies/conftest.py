"""Toy tokenizers of the two families, trained in memory on a few sentences."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|end|>"
ANSWERS = (
    "The United States of America has fifty states.\n\nThe capital is Washington.",
    "The United States of America is a country. The capital of France is Paris.",
    "So x = 3 and y = 4.\n\nSo x = 12 and y = 3.14, don't you think?",
    "def area(x):\n    return x * x\n\ndef cube(x):\n    return x * x * x",
    "今天天气很好。今天天气很好,我们去公园。ภาษาไทย 😀😀",
)


@pytest.fixture(scope="session")
def answers() -> tuple[str, ...]:
    return ANSWERS


@pytest.fixture(scope="session")
def end() -> str:
    """Text of the toy tokenizers' end-of-text token."""
    return EOS


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[EOS, "<|turn|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(ANSWERS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """BPE over U+2581 words with byte fallback, as Llama 2 has it; a text gets a space in front."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=180, limit_alphabet=40, show_progress=False)
    learner.train_from_iterator(ANSWERS, trainer)
    learnt = json.loads(learner.to_str())["model"]
    symbols = ["<unk>", EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {symbol: token_id for token_id, symbol in enumerate([*symbols, *learnt["vocab"]])}
    merges = [tuple(pair) for pair in learnt["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.pre_tokenizer = learner.pre_tokenizer
    tokenizer.add_special_tokens(["<unk>", EOS])
    return tokenizer
