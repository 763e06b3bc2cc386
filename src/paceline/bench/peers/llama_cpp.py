"""llama.cpp as an arm, in a Node.js process through the package node-llama-cpp.

The process has a copy of the weights of its own, written from the model in memory (`gguf_export.py`) and
loaded when the arm is built. What is timed is one line of ids to the process and one line of ids back, which
is microseconds beside a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.bench.arms import ArmAnswer, ArmName
from paceline.bench.peers.gguf_export import export_gguf
from paceline.bench.peers.line_process import LineProcess
from paceline.bench.peers.node_packages import PACKAGE, VERSION, check_package, find_node, packages_folder
from paceline.engine.generator import Generator
from paceline.errors import UnsupportedFeatureError
from paceline.targets.loading import target_fingerprint

PRECISIONS: Mapping[str, str] = MappingProxyType({"llama.cpp": "bf16", "llama.cpp-q8_0": "q8_0"})
# The cache of a context is allocated in whole; nothing that is measured here is longer.
MAX_CONTEXT_LEN = 8192
SCRIPT = Path(__file__).with_name("llama_cpp.mjs")


class LlamaCppArm:
    """Greedy decoding by llama.cpp on the CPU, one prompt at a time.

    Args:
        name: of the arm.
        command: starts a process that speaks the protocol of `llama_cpp.mjs`.
        tokenizer: for the text of an answer.
        eos_token_ids: ids that end a text, as the engine has them.
        context_len: positions that the process has room for.
        weights: their precision, for the report.

    Raises:
        PeerError: the process cannot load the model.
    """

    def __init__(
        self,
        name: str,
        command: Seq[str],
        tokenizer: Any,
        eos_token_ids: Seq[int],
        *,
        context_len: int,
        weights: str,
    ) -> None:
        self.name = ArmName(name)
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._context_len = context_len
        self._process = LineProcess(name, command)
        ready = self._process.read("release", "threads")
        self.description: Mapping[str, str | int] = {
            "software": f"{PACKAGE} {VERSION}, llama.cpp {ready['release']}, CPU",
            "weights": weights,
            "threads": int(ready["threads"]),
        }

    def answer(self, prompts: Seq[Seq[int]], max_new_tokens: int) -> list[ArmAnswer]:
        """Answer one prompt of token ids; nothing of earlier prompts is kept."""
        if len(prompts) != 1:
            raise UnsupportedFeatureError(
                f"peer {self.name.drafter!r} decodes one prompt at a time, {len(prompts)} were given: use "
                "--batch-size 1"
            )
        needed = len(prompts[0]) + max_new_tokens
        if needed > self._context_len:
            raise UnsupportedFeatureError(
                f"peer {self.name.drafter!r} has a context of {self._context_len} tokens, and prompt and "
                f"answer need {needed}: choose fewer --max-new-tokens or another suite"
            )
        question = {
            "prompt_ids": list(prompts[0]),
            "max_new_tokens": max_new_tokens,
            "eos_token_ids": self._eos_token_ids,
        }
        ids = [int(token_id) for token_id in self._process.ask(question, "ids")]
        return [ArmAnswer(tuple(ids), self._tokenizer.decode(ids, skip_special_tokens=True))]

    def close(self) -> None:
        """End the process."""
        self._process.close()


def build_llama_cpp(
    name: str,
    generator: Generator,
    *,
    packages: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> LlamaCppArm:
    """The arm `name` (a key of `PRECISIONS`) on the model behind a generator's target.

    Args:
        name: which precision.
        generator: its target's model is written as a GGUF file, once.
        packages: folder that npm installed into; by default that of the cache.
        progress: told in one line what takes time.

    Raises:
        MissingDependencyError: node or the package is missing; says how to install it.
        UnsupportedFeatureError: the model cannot be handed to llama.cpp, or is not on the CPU.
    """
    target: Any = generator.target
    if target.device.type != "cpu":
        raise UnsupportedFeatureError(
            f"peer {name!r} runs on the CPU, and the target is on {target.device.type}: use --device cpu"
        )
    folder = packages or packages_folder()
    node = find_node()
    check_package(folder)
    weights = export_gguf(
        target.model,
        generator.tokenizer,
        packages_folder() / "gguf",
        # A target that was not made by `paceline.load` may have none.
        fingerprint=target.fingerprint or target_fingerprint(target.model, generator.tokenizer),
        precision=PRECISIONS[name],
        progress=progress,
    )
    context_len = min(target.context_len, MAX_CONTEXT_LEN)
    arguments = (str(folder), str(weights), str(torch.get_num_threads()), str(context_len))
    return LlamaCppArm(
        name,
        [node, str(SCRIPT), *arguments],
        generator.tokenizer,
        sorted(generator.eos_token_ids),
        context_len=context_len,
        weights=PRECISIONS[name],
    )
