"""`paceline export`: write an EAGLE-3 head in the layout that vLLM serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from paceline.cli.console import notice

VOCABULARIES = ("full", "static")


def export(
    head: Annotated[Path, Argument(help="Folder of an EAGLE-3 head.")],
    out: Annotated[Path, Option(help="Folder of the exported head.")],
    target: Annotated[
        str, Option(help="The target it was trained for: alias, folder or Hub id.")
    ] = "smollm2",
    verifier_name: Annotated[
        str | None, Option(help="Name under which vLLM is to load the target; by default --target.")
    ] = None,
    vocabulary: Annotated[
        str | None,
        Option(
            help="full (the target's output layer) or static (rows of the head's subset); by default static "
            "for heads with rows of their own."
        ),
    ] = None,
    dtype: Annotated[str, Option(help="Of the written weights: fp32, bf16 or fp16.")] = "bf16",
    num_speculative_tokens: Annotated[int, Option(help="Proposed to vLLM, which drafts chains.")] = 3,
) -> None:
    """Write an EAGLE-3 head in the layout of vLLM's speculators."""
    import paceline
    from paceline.config import DTYPES, check_known, dtype_from_name
    from paceline.drafters.eagle import check_fit
    from paceline.drafters.eagle_vocabularies import output_layer_of
    from paceline.errors import CheckpointError, ConfigError, UnsupportedFeatureError
    from paceline.heads.formats.eagle_checkpoint import read_eagle, save_speculators_eagle3

    if vocabulary is not None:
        check_known("vocabulary", vocabulary, VOCABULARIES)
    check_known("dtype", dtype, DTYPES)
    if num_speculative_tokens < 1:
        raise ConfigError(f"--num-speculative-tokens is {num_speculative_tokens}: it must be at least 1")
    if verifier_name is None and (Path(target).exists() or "/" not in target):
        raise ConfigError(
            f"--target {target!r} is no name that vLLM can load: give --verifier-name, the model's Hub id"
        )
    wanted = dtype_from_name(dtype)
    model = paceline.load(target, drafter="none", dtype=dtype, execution="eager").target
    loaded = read_eagle(head, num_layers=model.num_layers, vocab_size=model.vocab_size)
    check_fit(model, loaded)
    rows, ids = loaded.rows, loaded.static_ids
    chosen = vocabulary or ("full" if rows is None else "static")
    if chosen == "full":
        if rows is not None:
            raise CheckpointError(f"head {head} has rows of its own: give --vocabulary static")
        ids = None
    elif ids is None:
        raise CheckpointError(f"head {head} has no static vocabulary: give --vocabulary full")
    elif rows is None:
        layer = output_layer_of(model)
        if layer.bias is not None:
            raise UnsupportedFeatureError(
                "the target's output layer has a bias, and the layout has none: give --vocabulary full"
            )
        rows = layer.rows(ids.to(model.device)).weight * layer.scale
    save_speculators_eagle3(
        out,
        loaded.head.to(wanted),
        output_weight=None if rows is None else rows.to("cpu", wanted),
        entry_ids=ids,
        vocab_size=model.vocab_size,
        verifier_name=verifier_name or target,
        verifier_architectures=(model.architecture_name,),
        num_speculative_tokens=num_speculative_tokens,
    )
    settings = {"method": "eagle3", "model": str(out), "num_speculative_tokens": num_speculative_tokens}
    notice(f"written; vllm serve {verifier_name or target} --speculative-config '{json.dumps(settings)}'")
