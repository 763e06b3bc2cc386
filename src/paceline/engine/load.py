"""`paceline.load`: from a name, a folder or a model in memory to a Generator."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import AUTO_WIDTH, EXECUTIONS, check_known, read_width
from paceline.errors import ConfigError, UnsupportedFeatureError
from paceline.registry import NamedDrafter, drafter_class, split_drafter, verifier_class

if TYPE_CHECKING:
    from paceline.drafters.base import DraftProposer
    from paceline.engine.generator import Generator
    from paceline.targets.base import TargetModel


def load(
    target: str | Path | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    drafter: str = "phrase",
    other_drafters: Seq[str] = (),
    head: str | Path | None = None,
    verifier: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    num_speculative_tokens: int | str = AUTO_WIDTH,
    max_batch_size: int = 16,
    prefill_seconds: float | None = None,
    execution: str = "auto",
    keep_model: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Generator:
    """Make a frozen model ready to answer.

    Args:
        target: alias (`smollm2`, `gemma3-270m`), local folder, GGUF file or Hub id.
        model: a Hugging Face causal LM already in memory, instead of `target`; it is shared, not copied.
        tokenizer: its tokenizer.
        drafter: registered drafter: `none`, `prompt_lookup`, `phrase`.
        other_drafters: further ones, `NAME` or `NAME:FOLDER` of a head, that a request may choose by their
            registered name instead; `none` is always among them then.
        head: folder of a trained head; by default the shipped head for this target.
        verifier: registered verifier; by default `greedy` at temperature 0 and `sampling` above.
        dtype: `auto`, `fp32`, `bf16` or `fp16`.
        device: `auto`, `cpu`, `cuda` or `mps`.
        num_speculative_tokens: most drafted nodes per round and sequence; `auto` drafts what this machine
            can verify at a profit.
        max_batch_size: requests decoded at once.
        prefill_seconds: about how long a piece of a prompt may hold up the answers of others; None reads as
            much at once as is fastest.
        execution: `fast` runs compiled kernels on packed weights on a CPU and captured forwards on CUDA,
            `eager` the model's own forward. `auto` is `fast` where this machine and this model allow it; for
            a model in memory it is `eager`, since packing makes a second copy of its weights and captured
            forwards fail when somebody moves them.
        keep_model: keep the loaded Hugging Face model usable (`generator.target.model`) beside the packed
            weights; otherwise weights that are packed are dropped from it.
        trust_remote_code: allow code from the model's repository.
        progress: called with a line when something takes long (first conversion of a GGUF).

    Raises:
        PacelineError: the target, the drafter or the head cannot be used; the message says why.
    """
    from paceline.engine.generator import Generator
    from paceline.engine.model_defaults import default_parameters, eos_token_ids
    from paceline.engine.node_budget import budget_of
    from paceline.engine.prefill import PREFILL_CHUNK, TimedPace
    from paceline.targets.huggingface import HuggingFaceTarget, WeightsDroppedError
    from paceline.targets.loading import LoadedModel, load_model, target_fingerprint
    from paceline.targets.sources import resolve_target

    if (target is None) == (model is None):
        raise ConfigError("give either a target's name or a model in memory (model=, tokenizer=), not both")
    check_known("execution", execution, EXECUTIONS)
    read_width(num_speculative_tokens)
    drafter_class(drafter)
    for other in other_drafters:
        split_drafter(other)
    if verifier is not None:
        verifier_class(verifier)

    def freeze(model: Any, tokenizer: Any, execution: str, *, releases: bool = False) -> HuggingFaceTarget:
        fingerprint = target_fingerprint(model, tokenizer)
        return HuggingFaceTarget(
            model, fingerprint=fingerprint, execution=execution, releases_model=releases, progress=progress
        )

    def load_loaded() -> LoadedModel:
        return load_model(
            resolve_target(str(target), progress=progress),
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        )

    if model is None:
        loaded = load_loaded()
        tokenizer = loaded.tokenizer
        try:
            frozen = freeze(loaded.model, tokenizer, execution, releases=not keep_model)
        except WeightsDroppedError as error:
            if execution != "auto":
                raise
            # Found out too late, with the weights dropped: once more, without the fast path.
            del loaded
            frozen = freeze(load_loaded().model, tokenizer, "eager")
            frozen.eager_reason = str(error)
        model = frozen.model
    else:
        _check_model_in_memory(model, tokenizer, dtype, device)
        frozen = freeze(model, tokenizer, "eager" if execution == "auto" else execution)
    # Without a drafter there is nothing to weigh, so nothing is measured.
    budget = budget_of(0 if drafter == "none" else num_speculative_tokens, frozen, progress)
    return Generator(
        frozen,
        tokenizer,
        _drafters(drafter, None if head is None else Path(head), other_drafters, frozen, budget.max_nodes),
        default_parameters=default_parameters(model),
        eos_token_ids=eos_token_ids(model, tokenizer),
        verifier=verifier,
        num_speculative_tokens=budget,
        max_batch_size=max_batch_size,
        prefill_chunk=PREFILL_CHUNK if prefill_seconds is None else TimedPace(prefill_seconds),
    )


def _drafters(
    name: str, head: Path | None, others: Seq[str], target: TargetModel, max_nodes: int
) -> DraftProposer:
    """The drafter, or several that requests choose from."""
    from paceline.drafters.switching import SwitchingDrafter

    first: DraftProposer = drafter_class(name).build(target, head, max_nodes)
    if not others:
        return first
    parts: dict[str, DraftProposer] = {name: first}
    for named in [split_drafter(text) for text in others] + [NamedDrafter("none", None)]:
        if named.name not in parts:
            parts[named.name] = drafter_class(named.name).build(target, named.head, max_nodes)
    return SwitchingDrafter(parts, name)


def _check_model_in_memory(model: Any, tokenizer: Any, dtype: str, device: str) -> None:
    """A model in memory stays as it is: options that would convert or move it are refused."""
    if tokenizer is None:
        raise ConfigError("a model in memory needs its tokenizer: give tokenizer=")
    if dtype != "auto" or device != "auto":
        raise ConfigError(
            f"dtype={dtype!r}, device={device!r}: a model in memory keeps its own; leave both at 'auto'"
        )
    if getattr(model, "peft_config", None):
        raise UnsupportedFeatureError(
            "adapters that can be swapped (LoRA) are not supported: merge them first"
        )
