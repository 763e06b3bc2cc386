"""economize (PyPI) as an arm: plain decoding and its prompt lookup, on the model in memory.

`economize.apply` wraps the model without changing it, and takes and gives token ids. The drafter's settings
are those of the example in the package's own documentation: n-grams of up to three tokens, cycles of six.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch

from paceline.bench.arms import ArmAnswer, ArmName
from paceline.config import dtype_name
from paceline.engine.generator import Generator
from paceline.errors import MissingDependencyError, UnsupportedFeatureError

VERSION = "0.3.2"
# Name -> tokens of a cycle; 1 is decoding without a drafter.
CYCLE_LENGTHS: Mapping[str, int] = MappingProxyType({"economize": 1, "economize-lookup": 6})
_MAX_NGRAM = 3


class EconomizeArm:
    """Greedy decoding by economize's own loop.

    Args:
        name: a key of `CYCLE_LENGTHS`.
        model: Hugging Face model; it is shared.
        tokenizer: for the text of an answer.
        eos_token_ids: ids that end a text, as the engine has them.

    Raises:
        MissingDependencyError: the package is not installed in the version that was tried.
        UnsupportedFeatureError: economize does not take this model.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, eos_token_ids: Seq[int]) -> None:
        check_package()
        import economize
        from economize.techniques.lookup import LookupConfig

        self.name = ArmName(name)
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        cycle_length = CYCLE_LENGTHS[name]
        techniques = [LookupConfig(max_ngram=_MAX_NGRAM)] if cycle_length > 1 else []
        try:
            self._model = economize.apply(
                model, *techniques, decoding=economize.DecodeConfig(cycle_length=cycle_length)
            )
        except economize.EconomizeError as error:
            raise UnsupportedFeatureError(f"peer {name!r} does not take this model: {error}") from error
        self.description: Mapping[str, str | int] = {
            "software": f"economize {VERSION}",
            "weights": dtype_name(model.dtype),
            "threads": torch.get_num_threads(),
        }

    @torch.inference_mode()
    def answer(self, prompts: Seq[Seq[int]], max_new_tokens: int) -> list[ArmAnswer]:
        """Answer prompts of token ids as one batch."""
        device = self._model.device
        results = self._model.decode_batch(
            [torch.tensor(list(ids), device=device) for ids in prompts],
            max_new_tokens,
            stop=self._eos_token_ids or None,
        )
        answers = [result.tokens.tolist() for result in results]
        return [
            ArmAnswer(tuple(ids), self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers
        ]


def check_package() -> None:
    """Raise MissingDependencyError unless the pinned version is installed."""
    try:
        found: str | None = version("economize")
    except PackageNotFoundError:
        found = None
    if found != VERSION:
        raise MissingDependencyError(
            f"peer 'economize' needs economize {VERSION}, and {found or 'none'} is installed: run "
            f"`pip install economize=={VERSION}`"
        )


def build_economize(name: str, generator: Generator) -> EconomizeArm:
    """The arm `name` on the model behind a generator's target."""
    target: Any = generator.target
    return EconomizeArm(name, target.model, generator.tokenizer, sorted(generator.eos_token_ids))
