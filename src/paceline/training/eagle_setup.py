"""What an EAGLE fit starts from: shape, fresh or given weights, and the ids of the static vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError, ConfigError, UnsupportedFeatureError
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle_folder import LoadedEagle, load_eagle
from paceline.targets.base import TargetModel
from paceline.training.context import RunContext
from paceline.training.eagle_options import EagleTrainingOptions
from paceline.training.prompts import read_prompts
from paceline.training.shards import read_answers
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import VocabularyRanking
from paceline.vocabularies.static import FrequentIds, frequent_ids

Context = RunContext[EagleTrainingOptions]
MAX_STATIC_ENTRIES = 32_000
"""As published; of smaller vocabularies a quarter is taken, which is what 32,000 are of Llama's."""
_SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class EagleParts:
    """Everything that learns.

    Attributes:
        head: the layer.
        ranking: beside a speculated vocabulary.
        rows: a reduced output layer of its own.
        ids: int64 [S], what its rows mean.
    """

    head: EagleHead
    ranking: VocabularyRanking | None = None
    rows: nn.Linear | None = None
    ids: Tensor | None = None


def eagle_config(options: EagleTrainingOptions, target: TargetModel) -> EagleConfig:
    """Shape of a fresh head: the target's own layer, unless the options say otherwise.

    Raises:
        ConfigError: the target does not know the shape of its layers and the options do not give it, or they
            name layers that it does not have.
    """
    shape = target.layer_shape
    sizes = {name: getattr(options, name) for name in _SIZES}
    if shape is None:
        missing = [f"--{name.replace('_', '-')}" for name, size in sizes.items() if size is None]
        if missing:
            raise ConfigError(f"the target does not tell the shape of its layers: give {', '.join(missing)}")
    else:
        sizes = {name: getattr(shape, name) if size is None else size for name, size in sizes.items()}
    layers = options.feature_layers
    if layers is None:
        layers = default_feature_layers(target.num_layers)
    outside = [layer for layer in layers if layer >= target.num_layers]
    if outside:
        raise ConfigError(
            f"--feature-layers names {outside}: the target has layers 0 to {target.num_layers - 1}"
        )
    described: dict[str, Any] = {} if shape is None else {
        "rope_parameters": shape.rope_parameters,
        "max_position_embeddings": shape.max_position_embeddings,
        "norm_eps": shape.norm_eps,
    }  # fmt: skip
    return EagleConfig(
        kind="eagle3",
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        feature_layers=layers,
        **sizes,
        **described,
    )


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice: the inputs of layers 2, L / 2 and L - 3, as far as the target has them."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in wanted}))


def eagle_parts(context: Context, layer: OutputLayer) -> EagleParts:
    """Fresh parts by the options, or those of the head that is gone on from.

    Raises:
        CheckpointError: that head cannot be trained as the options ask.
        UnsupportedFeatureError: nor can this target's output layer.
    """
    options, target = context.options, context.generator.target
    init = initial_head(options, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = EagleHead(eagle_config(options, target)) if init is None else init.head
        if options.vocabulary == "full":
            return EagleParts(head)
        if options.vocabulary == "speculative":
            ranking = None if init is None else init.ranking
            if ranking is None:
                ranking = VocabularyRanking(target.hidden_size, layer.num_entries, options.ranking_width)
            return EagleParts(head, ranking=ranking)
    if layer.bias is not None:
        raise UnsupportedFeatureError(
            "--vocabulary static trains rows without a bias, and the target's output layer has one: use full "
            "or speculative"
        )
    ids = static_ids(context).entry_ids
    rows = nn.Linear(target.hidden_size, len(ids), bias=False)
    given = None if init is None else init.rows
    with torch.no_grad():
        # From the target's own rows: a fresh layer would first have to learn what they know.
        rows.weight.copy_(layer.weight[ids].float() * layer.scale if given is None else given)
    return EagleParts(head, rows=rows, ids=ids)


def initial_head(options: EagleTrainingOptions, target: TargetModel) -> LoadedEagle | None:
    """The head that is gone on from, if any.

    Raises:
        CheckpointError: it is of another shape than the options or the target ask for.
    """
    if options.init is None:
        return None
    loaded = load_eagle(options.init)
    config = loaded.head.config
    own: dict[str, object] = {name: getattr(config, name) for name in (*_SIZES, "feature_layers")}
    own["ranking_width"] = None if loaded.ranking is None else loaded.ranking.width
    own["static_entries"] = None if loaded.static_ids is None else len(loaded.static_ids)
    for name, value in own.items():
        wanted = getattr(options, name)
        if wanted is not None and value is not None and wanted != value:
            raise CheckpointError(
                f"head {options.init} has {name} {value}, --{name.replace('_', '-')} asks for {wanted}: "
                "leave the option out, or train without --init"
            )
    if config.kind != "eagle3" or config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"head {options.init} is of kind {config.kind} and {config.hidden_size} wide: it must be eagle3 "
            f"and as wide as the target's states, {target.hidden_size}"
        )
    if (loaded.rows is not None) != (options.vocabulary == "static"):
        trained = "with rows of its own" if loaded.rows is not None else "with the target's output layer"
        raise CheckpointError(
            f"head {options.init} was trained {trained}, --vocabulary {options.vocabulary} asks for the "
            "other: its states would mean something else"
        )
    return loaded


def static_ids(context: Context) -> FrequentIds:
    """The tokens of the static vocabulary, and the share of the target's own tokens that they cover.

    A head that is gone on from keeps its map: rows that were trained would mean other tokens otherwise.
    """
    options = context.options
    own = answer_counts(context)
    forced = [i for i in context.generator.eos_token_ids if i < len(own)]
    init = None if options.init is None else load_eagle(options.init).static_ids
    if init is not None:
        return covered(context, init)
    counts = own if not options.static_corpus else corpus_counts(context)
    num_ids = options.static_entries
    if num_ids is None:
        num_ids = min(MAX_STATIC_ENTRIES, max(1, len(own) // 4))
    return covered(context, frequent_ids(counts, num_ids, forced).entry_ids)


def covered(context: Context, entry_ids: Tensor) -> FrequentIds:
    """Ids, and the share of what the target says in the training answers that they hold."""
    counts = answer_counts(context)
    share = float(counts[entry_ids].sum()) / max(float(counts.sum()), 1.0)
    # A subset that nothing said is in would still be a legal one.
    return FrequentIds(entry_ids, max(share, 1e-6))


def answer_counts(context: Context) -> Tensor:
    """int64 [V]: how often the target said each token in the training answers (VocabTrim)."""
    counts = torch.zeros(context.generator.target.vocab_size, dtype=torch.int64)
    for answer in read_answers(context.answers_folder):
        if context.is_training(answer.root_key):
            counts += torch.bincount(answer.output_ids, minlength=len(counts))
    return counts


def corpus_counts(context: Context) -> Tensor:
    """int64 [V]: how often each token occurs in the texts of `--static-corpus` (FR-Spec)."""
    counts = torch.zeros(context.generator.target.vocab_size, dtype=torch.int64)
    for text in _corpus_texts(context):
        ids = torch.tensor(context.generator.tokenizer.encode(text, add_special_tokens=False))
        counts += torch.bincount(ids.long(), minlength=len(counts))[: len(counts)]
    return counts


def _corpus_texts(context: Context) -> Iterator[str]:
    """Everything that is said in the rows of the corpus."""
    for prompt in read_prompts(context.options.static_corpus):
        for message in prompt.messages:
            yield message["content"]
