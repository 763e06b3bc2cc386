"""EAGLE checkpoints as they are published, read; and speculators' layout, written so that vLLM can serve it.

| layout | told by | names | layers of features |
|---|---|---|---|
| EAGLE-1 and 2 | no `hidden_norm` | `fc`, `layers.0.*`, `embed_tokens` | none |
| EAGLE-3, SpecForge, AngelSlim | `midlayer.*` | + `norm`, `lm_head`, `d2t`, `t2d` | outputs |
| speculators | `speculators_model_type` | `layers.0.*` | inputs |
| `eagle3_*_ttt7`, all tokens | no `d2t` | `layers.0.*`, copies of `embed_tokens` and `lm_head` | outputs |

"Outputs" names the layer whose output is read, "inputs" the one behind it; heads here hold inputs. Files
without layer numbers have EAGLE's own: the inputs of 2, L / 2 and L - 3.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CheckpointError, ConfigError
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle_folder import LoadedEagle, load_eagle
from paceline.heads.formats.tensor_files import read_tensors
from paceline.vocabularies.static import ids_from_offsets

_LAYER_PREFIXES = ("midlayer.", "layers.0.")
# Variants whose arithmetic is not published; a head of theirs would draft nonsense silently.
_UNKNOWN_SWITCHES = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class ImportedEagle:
    """A published head in memory.

    Attributes:
        head: in fp32 and in evaluation mode.
        output_weight: [S, D], its own output layer; None where it uses the target's.
        entry_ids: int64 [S], what those rows mean in the target's vocabulary; None for all of it in order.
    """

    head: EagleHead
    output_weight: Tensor | None
    entry_ids: Tensor | None


def load_public_eagle(folder: str | Path, *, num_layers: int, vocab_size: int) -> ImportedEagle:
    """Read a published checkpoint.

    Args:
        folder: with `config.json` and weights.
        num_layers: of the target.
        vocab_size: of the target.

    Raises:
        CheckpointError: something is missing, superfluous or does not fit.
    """
    folder = Path(folder)
    document = _read_config(folder)
    tensors = {_plain_name(name): tensor for name, tensor in read_tensors(folder).items()}
    output_weight = tensors.pop("lm_head.weight", None)
    # A copy of the target's, which drafting looks up there.
    tensors.pop("embed_tokens.weight", None)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    try:
        config = _head_config(document, tensors, num_layers)
        with torch.device("meta"):
            head = EagleHead(config)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    _load_weights(folder, head, tensors)
    num_rows = None
    if output_weight is not None:
        _check_finite(folder, "lm_head.weight", output_weight)
        num_rows = output_weight.shape[0]
    entry_ids = _entry_ids(folder, d2t, t2d, num_rows, vocab_size)
    return ImportedEagle(head.float().eval(), output_weight, entry_ids)


def read_eagle(folder: str | Path, *, num_layers: int, vocab_size: int) -> LoadedEagle:
    """Read a folder of ours or a published one, told apart by `head_type` in `config.json`.

    Raises:
        CheckpointError: see `load_eagle` and `load_public_eagle`.
    """
    folder = Path(folder)
    if "head_type" in _read_config(folder):
        return load_eagle(folder)
    found = load_public_eagle(folder, num_layers=num_layers, vocab_size=vocab_size)
    ids, rows = found.entry_ids, found.output_weight
    if rows is not None and ids is None:
        # A full output layer of its own: all entries, in order.
        ids = torch.arange(len(rows))
    return LoadedEagle(found.head, None, ids, rows, {})


def save_speculators_eagle3(
    folder: str | Path,
    head: EagleHead,
    *,
    output_weight: Tensor | None,
    entry_ids: Tensor | None,
    vocab_size: int,
    verifier_name: str,
    verifier_architectures: tuple[str, ...],
    num_speculative_tokens: int = 3,
) -> None:
    """Write an EAGLE-3 head in the layout of vLLM's speculators.

    Args:
        folder: created when needed; files of these names are replaced.
        head: of kind `eagle3`.
        output_weight: [S, D]; None where the target's own is used, which is not written a second time.
        entry_ids: int64 [S], ascending; None for the whole vocabulary.
        vocab_size: of the target.
        verifier_name: the target as vLLM should load it.
        verifier_architectures: its class names.
        num_speculative_tokens: proposed to vLLM, which drafts chains.

    Raises:
        CheckpointError: the head is of another kind, or ids and rows do not fit together.
    """
    config = head.config
    if config.kind != "eagle3":
        raise CheckpointError(f"a head of kind {config.kind!r}: speculators' layout is written for 'eagle3'")
    if entry_ids is not None and (output_weight is None or len(output_weight) != len(entry_ids)):
        raise CheckpointError(
            f"{len(entry_ids)} ids for {0 if output_weight is None else len(output_weight)} rows: one row an "
            "id is needed"
        )
    tensors = {
        f"layers.0.{name.removeprefix('layer.')}" if name.startswith("layer.") else name: parameter.detach()
        for name, parameter in head.named_parameters()
    }
    if output_weight is not None:
        tensors["lm_head.weight"] = output_weight.detach()
    if entry_ids is not None:
        tensors["d2t"] = entry_ids - torch.arange(len(entry_ids))
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[entry_ids] = True
        tensors["t2d"] = mask
    document = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}],
            "verifier": {"name_or_path": verifier_name, "architectures": list(verifier_architectures)},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": dict(config.rope_parameters),
            "max_position_embeddings": config.max_position_embeddings,
            "attention_bias": config.has_attention_bias,
            "vocab_size": vocab_size,
        },
        "draft_vocab_size": vocab_size if entry_ids is None else len(entry_ids),
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "norm_before_residual": config.normalises_residual,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / "model.safetensors")
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


def _read_config(folder: Path) -> dict[str, Any]:
    """`config.json`."""
    try:
        document = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: config.json cannot be read ({error})") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{folder}: config.json is no object")
    unknown = [name for name in _UNKNOWN_SWITCHES if document.get(name)]
    if unknown:
        raise CheckpointError(f"{folder}: config.json sets {', '.join(unknown)}: such heads cannot be read")
    return document


def _plain_name(name: str) -> str:
    """A parameter's name in `EagleHead`."""
    name = name.removeprefix("model.")
    for prefix in _LAYER_PREFIXES:
        if name.startswith(prefix):
            return f"layer.{name.removeprefix(prefix)}"
    return name


def _head_config(document: Mapping[str, Any], tensors: Mapping[str, Tensor], num_layers: int) -> EagleConfig:
    """Shape of the head: the file's numbers, corrected by its weights where they disagree."""
    own: Mapping[str, Any] = document.get("transformer_layer_config") or document
    is_eagle3 = "layer.hidden_norm.weight" in tensors
    missing = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if key not in own]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)}")
    activation = own.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json has hidden_act {activation!r}: EAGLE heads here have 'silu'")
    num_heads = own["num_attention_heads"]
    queries = tensors.get("layer.self_attn.q_proj.weight")
    if queries is None:
        raise ConfigError("the weights hold no layer.self_attn.q_proj.weight")
    # Published head_dim have been wrong; the weights cannot be.
    head_dim = queries.shape[0] // num_heads
    target_size = document.get("target_hidden_size") or own["hidden_size"]
    return EagleConfig(
        kind="eagle3" if is_eagle3 else "eagle",
        hidden_size=own["hidden_size"],
        target_hidden_size=target_size,
        intermediate_size=own["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=own.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        feature_layers=_feature_layers(document, num_layers) if is_eagle3 else (),
        rope_parameters=_rope_parameters(own),
        max_position_embeddings=own.get("max_position_embeddings", 2048),
        norm_eps=own.get("rms_norm_eps", 1e-6),
        has_attention_bias="layer.self_attn.q_proj.bias" in tensors,
        has_output_bias="layer.self_attn.o_proj.bias" in tensors,
        has_fusion_bias="fc.bias" in tensors,
        normalises_residual=bool(document.get("norm_before_residual", False)),
        normalises_heads="layer.self_attn.q_norm.weight" in tensors,
    )


def _feature_layers(document: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs are read."""
    named = document.get("eagle_aux_hidden_state_layer_ids")
    if named is None:
        named = (document.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if named is None:
        return (2, num_layers // 2, num_layers - 3)
    shift = 0 if "speculators_model_type" in document else 1
    layers = tuple(int(layer) + shift for layer in named)
    if shift == 0 and layers == (1, num_layers // 2 - 1, num_layers - 4):
        warnings.warn(
            f"config.json names layers {list(layers)} in speculators' layout, which counts inputs; these are "
            "the numbers of SpecForge, which counts outputs: if acceptance is poor, add 1 to each",
            stacklevel=2,
        )
    outside = [layer - shift for layer in layers if not shift <= layer < num_layers]
    if outside:
        what = "outputs of layers" if shift else "inputs of layers"
        raise ConfigError(
            f"config.json names {what} {outside}: the target has layers 0 to {num_layers - 1}, and what is "
            "read must be the input of one of them"
        )
    return layers


def _rope_parameters(own: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes them, from either way of writing; without any, EAGLE's own default."""
    found = own.get("rope_parameters")
    if found is not None:
        return {"rope_type": "default", "rope_theta": own.get("rope_theta", 10000.0), **found}
    scaling = dict(own.get("rope_scaling") or {})
    scaling["rope_type"] = scaling.pop("type", None) or scaling.get("rope_type") or "default"
    return {**scaling, "rope_theta": own.get("rope_theta", 10000.0)}


def _load_weights(folder: Path, head: EagleHead, tensors: dict[str, Tensor]) -> None:
    """Put every tensor in its place; nothing may be left over or stay random."""
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    for what, names in (
        ("missing", wanted.keys() - tensors.keys()),
        ("unknown", tensors.keys() - wanted.keys()),
    ):
        if names:
            raise CheckpointError(f"{folder}: {what} tensors {sorted(names)}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, config.json asks for {wanted[name]}"
            )
        _check_finite(folder, name, tensor)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)


def _check_finite(folder: Path, name: str, tensor: Tensor) -> None:
    """A number that is none would spread through the drafts of a whole batch."""
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{folder}: {name} holds values that are not finite")


def _entry_ids(
    folder: Path, d2t: Tensor | None, t2d: Tensor | None, num_rows: int | None, vocab_size: int
) -> Tensor | None:
    """What the rows of the output layer mean."""
    if num_rows is None:
        if d2t is not None:
            raise CheckpointError(f"{folder}: d2t has {len(d2t)} entries, and there is no lm_head.weight")
        return None
    if d2t is None:
        if num_rows != vocab_size:
            raise CheckpointError(
                f"{folder}: lm_head has {num_rows} rows for {vocab_size} tokens, and no d2t says which ones"
            )
        return None
    if len(d2t) != num_rows:
        raise CheckpointError(f"{folder}: d2t has {len(d2t)} entries and lm_head {num_rows} rows")
    if num_rows < vocab_size and not bool(d2t.any()):
        raise CheckpointError(
            f"{folder}: d2t is all zero for {num_rows} of {vocab_size} tokens: the map was lost"
        )
    try:
        ids = ids_from_offsets(d2t, vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    _check_marks(folder, d2t, t2d, ids, vocab_size)
    return ids


def _check_marks(folder: Path, d2t: Tensor, t2d: Tensor | None, ids: Tensor, vocab_size: int) -> None:
    """Ids in place of offsets are ascending too: the mask tells them apart, or else their gaps do."""
    if t2d is None:
        if 1 < len(d2t) < vocab_size and bool((d2t.diff() > 0).all()):
            raise CheckpointError(
                f"{folder}: d2t rises at every entry, as ids do and offsets hardly can, and there is no t2d"
            )
        return
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    if t2d.shape != mask.shape or not torch.equal(t2d.bool(), mask):
        raise CheckpointError(
            f"{folder}: t2d marks {int(t2d.sum())} tokens and d2t maps {len(ids)}: they must be the same"
        )
