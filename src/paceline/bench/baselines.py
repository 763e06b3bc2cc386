"""Baselines: Hugging Face `generate()` on the very model in memory, plain and with its own prompt lookup.

And on a copy of it in another dtype: which dtype is Hugging Face's faster one depends on the processor.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from paceline.bench.arms import Arm, ArmAnswer, ArmName
from paceline.config import check_known
from paceline.engine.generator import Generator
from paceline.errors import UnsupportedFeatureError

# Name -> settings of GenerationConfig beyond plain greedy decoding.
BASELINES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "hf_generate": {},
        "hf_generate_fp32": {},
        "hf_generate_bf16": {},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": 10},
    }
)
# Baselines that run a copy of the model in a dtype of their own.
OTHER_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"hf_generate_fp32": torch.float32, "hf_generate_bf16": torch.bfloat16}
)


class HuggingFaceArm:
    """Greedy `model.generate` with a cache, stopping where the engine stops.

    Args:
        baseline: a key of BASELINES.
        model: the model that the engine's target wraps.
        tokenizer: for the text of an answer.
        eos_token_ids: ids that end a text, as the engine has them.
    """

    def __init__(self, baseline: str, model: Any, tokenizer: Any, eos_token_ids: Seq[int]) -> None:
        check_known("baseline", baseline, BASELINES)
        self.name = ArmName(baseline)
        self._model = model
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._settings = BASELINES[baseline]
        pad = getattr(tokenizer, "pad_token_id", None)
        self._pad_token_id = int(pad if pad is not None else next(iter(self._eos_token_ids), 0))

    @torch.inference_mode()
    def answer(self, prompts: Seq[Seq[int]], max_new_tokens: int) -> list[ArmAnswer]:
        """Answer prompts of token ids as one batch, padded on the left."""
        if self._settings and len(prompts) > 1:
            raise UnsupportedFeatureError(
                f"baseline {self.name.drafter!r} decodes one prompt at a time, {len(prompts)} were given: "
                "use --batch-size 1"
            )
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self._pad_token_id)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        device = self._model.device
        output: Tensor = self._model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=self._config(max_new_tokens),
        )
        return [self._answer(row) for row in output[:, width:].tolist()]

    def _config(self, max_new_tokens: int) -> Any:
        """Plain greedy decoding: what a model's own configuration may ask for beyond it is switched off."""
        from transformers import GenerationConfig

        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=self._eos_token_ids or None,
            pad_token_id=self._pad_token_id,
            **self._settings,
        )

    def _answer(self, row: list[int]) -> ArmAnswer:
        """Ids up to the first end of sequence; what follows is padding."""
        end = next((i for i, token_id in enumerate(row) if token_id in self._eos_token_ids), len(row))
        ids = row[: end + 1]
        return ArmAnswer(tuple(ids), self._tokenizer.decode(ids, skip_special_tokens=True))


def baseline_arms(generator: Generator, names: Seq[str]) -> list[Arm]:
    """Baselines on the model behind a generator's target."""
    for name in names:
        check_known("baseline", name, BASELINES)
    model = getattr(generator.target, "model", None)
    if names and not hasattr(model, "generate"):
        raise UnsupportedFeatureError(
            f"target {type(generator.target).__name__} wraps no Hugging Face model to run "
            f"{', '.join(names)} on: leave --baseline empty"
        )
    eos = sorted(generator.eos_token_ids)
    return [HuggingFaceArm(name, _model_for(name, model), generator.tokenizer, eos) for name in names]


def _model_for(name: str, model: Any) -> Any:
    """The model itself, or a copy in the baseline's own dtype."""
    dtype = OTHER_DTYPES.get(name)
    return model if dtype in (None, model.dtype) else copy.deepcopy(model).to(dtype)
