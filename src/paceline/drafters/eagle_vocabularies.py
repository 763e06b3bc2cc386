"""The output vocabularies that a loaded EAGLE head can draft with."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config import check_known
from paceline.errors import CheckpointError, UnsupportedFeatureError
from paceline.heads.eagle_folder import LoadedEagle
from paceline.targets.base import TargetModel
from paceline.vocabularies.base import OutputVocabulary
from paceline.vocabularies.full import FullVocabulary
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import DEFAULT_NUM_CANDIDATES, SpeculativeVocabulary
from paceline.vocabularies.static import StaticVocabulary

VOCABULARIES = ("full", "static", "speculative")


def output_layer_of(target: TargetModel) -> OutputLayer:
    """The target's output layer; all of it is scored by the target itself, on its fastest path.

    Raises:
        UnsupportedFeatureError: the target does not show the weights.
    """
    rows = target.output_rows
    if rows is None:
        raise UnsupportedFeatureError(
            "EAGLE heads score with rows of the target's output layer, and this target does not show them"
        )
    return OutputLayer(rows.weight, rows.bias, rows.scale, rows.soft_cap, target.lm_head)


def vocabulary_of(name: str, target: TargetModel, loaded: LoadedEagle) -> OutputVocabulary:
    """Build a vocabulary for a head.

    Args:
        name: of `VOCABULARIES`.
        target: whose layer it is.
        loaded: the head, with what the vocabulary needs beside the layer.

    Raises:
        CheckpointError: the head's folder lacks it, or it is of another size.
        UnsupportedFeatureError: the target does not show the weights of its output layer.
    """
    check_known("vocabulary", name, VOCABULARIES)
    if name == "static" and loaded.rows is not None:
        return StaticVocabulary(
            OutputLayer(loaded.rows.to(target.device, target.dtype)),
            _static_ids(loaded),
            target.vocab_size,
            loaded.coverage,
        )
    if loaded.rows is not None:
        raise CheckpointError(
            f"the head was trained with an output layer of its own, vocabulary {name!r} reads the target's: "
            "use vocabulary 'static'"
        )
    layer = output_layer_of(target)
    if name == "full":
        return FullVocabulary(layer)
    if name == "static":
        return StaticVocabulary.of_rows(layer, _static_ids(loaded), loaded.coverage)
    if loaded.ranking is None:
        raise CheckpointError("the head has no ranking for a speculated vocabulary: use vocabulary 'full'")
    ranking = loaded.ranking.to(target.device)
    if target.device.type == "cpu" and target.dtype is torch.bfloat16:
        ranking = ranking.to(torch.bfloat16)
    num_candidates = min(DEFAULT_NUM_CANDIDATES, layer.num_entries)
    return SpeculativeVocabulary(layer, ranking, num_candidates, shares_candidates=True)


def _static_ids(loaded: LoadedEagle) -> Tensor:
    """Ids of the static vocabulary."""
    if loaded.static_ids is None:
        raise CheckpointError("the head has no static vocabulary: use vocabulary 'full'")
    return loaded.static_ids
