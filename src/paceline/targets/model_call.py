"""One call of a Hugging Face model's decoder: its own modules, our mask, positions and cache.

Eager and captured forwards both end here, so that they run the same code of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.kv_cache import KVCache
from paceline.targets import attention
from paceline.targets.architecture import Architecture


@dataclass(frozen=True, slots=True)
class ModelStates:
    """What a decoder computed for a padded batch.

    Attributes:
        hidden: [B, T, D] after the final norm.
        features: layer -> [B, T, D], the input of that layer.
    """

    hidden: Tensor
    features: dict[int, Tensor]


class ModelCall:
    """Calls the decoder of `model`.

    Args:
        model: a causal LM.
        architecture: its parts.

    Attributes:
        uses_packed_attention: whether attention over our cache goes through `attention.packed_sdpa`.
    """

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self._model = model
        self._base: nn.Module = architecture.base_model
        self._layers = architecture.layers
        self._cache_argument = (
            "cache" if "cache" in inspect.signature(self._base.forward).parameters else "past_key_values"
        )
        # Falcon and others call sdpa in code of their own, which knows its own name only.
        has_interface = bool(getattr(model, "_supports_attention_backend", False))
        self.uses_packed_attention = architecture.is_sdpa and has_interface

    def __call__(
        self, token_ids: Tensor, positions: Tensor, mask: object, cache: object, features: Seq[int] = ()
    ) -> ModelStates:
        """Run all layers and the final norm, not the output layer.

        Args:
            token_ids: int64 [B, T].
            positions: int64 [B, T].
            mask: as `attention.model_masks` makes it.
            cache: takes keys and values.
            features: layers whose inputs are wanted.
        """
        is_packed = isinstance(cache, KVCache) and self.uses_packed_attention
        packed = attention.packed_attention(self._model) if is_packed else nullcontext()
        with packed, self._hooked(features) as captured:
            output: Any = self._base(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{self._cache_argument: cache},
            )
        return ModelStates(output.last_hidden_state, captured)

    @contextmanager
    def _hooked(self, features: Seq[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the inputs of the layers asked for during the block."""
        captured: dict[int, Tensor] = {}

        def hook_for(layer: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        with ExitStack() as stack:
            for layer in features:
                module = self._layers[layer]
                handle = module.register_forward_pre_hook(hook_for(layer), with_kwargs=True)
                stack.callback(handle.remove)
            yield captured
