"""Options of the commands that answer prompts: the model on one side, the sampling on the other."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from paceline.cli.console import notice
from paceline.config import AUTO_WIDTH
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.engine.generator import Generator
    from paceline.grammar import Grammar
    from paceline.sampling import SamplingParameters

MODEL_PANEL = "Model"
SAMPLING_PANEL = "Sampling"
# Options that are not a field of SamplingParameters under the same name and with the same meaning.
_TRANSLATED = ("stop", "eos_token_id", "logit_bias", "bad_words", "json_schema")
_FILTERS = ("top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model answers, and how it is sped up."""

    target: Annotated[
        str,
        Option(
            help="Alias (smollm2, gemma3-270m), folder, GGUF file or Hub id.", rich_help_panel=MODEL_PANEL
        ),
    ] = "smollm2"
    drafter: Annotated[
        str,
        Option(
            help="What drafts: phrase, prompt_lookup, phrase+prompt_lookup or none.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = "phrase"
    head: Annotated[
        Path | None,
        Option(help="Folder of a trained head; by default the shipped one.", rich_help_panel=MODEL_PANEL),
    ] = None
    verifier: Annotated[
        str | None,
        Option(
            help="greedy or sampling (lossless), budgeted, typical or margin (lossy); by default greedy at "
            "temperature 0 and sampling above.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        str,
        Option(help="Most drafted tokens a round; auto: what pays here.", rich_help_panel=MODEL_PANEL),
    ] = AUTO_WIDTH
    dtype: Annotated[str, Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=MODEL_PANEL)] = "auto"
    device: Annotated[str, Option(help="auto, cpu, cuda or mps.", rich_help_panel=MODEL_PANEL)] = "auto"
    execution: Annotated[
        str, Option(help="auto, fast (compiled, or CUDA graphs) or eager.", rich_help_panel=MODEL_PANEL)
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        Option(
            "--trust-remote-code", help="Run code of the model's repository.", rich_help_panel=MODEL_PANEL
        ),
    ] = False

    def load(self, **settings: Any) -> Generator:
        """The generator that these options describe; long steps are told on standard error.

        Args:
            settings: further arguments of `paceline.load`.
        """
        import paceline

        return paceline.load(
            self.target,
            drafter=self.drafter,
            head=self.head,
            verifier=self.verifier,
            dtype=self.dtype,
            device=self.device,
            num_speculative_tokens=self.num_speculative_tokens,
            execution=self.execution,
            trust_remote_code=self.trust_remote_code,
            progress=notice,
            **settings,
        )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the answer is chosen; what is not given keeps the model's own default."""

    max_new_tokens: Annotated[
        int | None, Option(help="Most tokens of the answer.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    min_new_tokens: Annotated[
        int | None, Option(help="No end of text before so many tokens.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    temperature: Annotated[float | None, Option(help="0 is greedy.", rich_help_panel=SAMPLING_PANEL)] = None
    top_p: Annotated[
        float | None,
        Option(help="Keep the likeliest tokens up to this mass.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    top_k: Annotated[
        int | None, Option(help="Keep the K likeliest tokens (0: all).", rich_help_panel=SAMPLING_PANEL)
    ] = None
    min_p: Annotated[
        float | None,
        Option(help="Drop tokens below this share of the likeliest one's.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    seed: Annotated[
        int | None,
        Option(help="Same seed, same text (fp32, or the fast path).", rich_help_panel=SAMPLING_PANEL),
    ] = None
    stop: Annotated[
        list[str] | None, Option(help="End the text here; may be repeated.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    include_stop_string: Annotated[
        bool | None,
        Option("--include-stop-string", help="Keep the stop text.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    ignore_eos: Annotated[
        bool | None,
        Option("--ignore-eos", help="Go on after the end of text.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    eos_token_id: Annotated[
        list[int] | None,
        Option(
            help="Token that ends the text, instead of the model's; may be repeated.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Option(help="Above 1 discourages every token seen so far.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    presence_penalty: Annotated[
        float | None, Option(help="Taken once from tokens of the answer.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    frequency_penalty: Annotated[
        float | None, Option(help="Taken per occurrence in the answer.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, Option(help="No group of N tokens occurs twice.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        Option(
            metavar="ID=AMOUNT",
            help="Add to a token's logit; may be repeated.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        Option(help="Text that must not appear; may be repeated.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    json_schema: Annotated[
        Path | None,
        Option(help="File with a JSON schema that the answer follows.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    logprobs: Annotated[
        int | None,
        Option(
            help="With --json: log-probability of each token and of N others.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = None

    def parameters(self, generator: Generator) -> SamplingParameters:
        """The model's own defaults, changed by the options that were given."""
        changes = self._plain_changes()
        if self.stop:
            changes["stop"] = tuple(self.stop)
        if self.eos_token_id:
            changes["eos_token_ids"] = tuple(self.eos_token_id)
        if self.logit_bias:
            changes["logit_bias"] = dict(_bias(text) for text in self.logit_bias)
        if self.bad_words:
            changes["bad_words"] = _token_sequences(self.bad_words, generator)
        if self.json_schema is not None:
            changes["grammar"] = _grammar(self.json_schema)
        parameters = generator.default_parameters.updated(changes)
        idle = [name for name in _FILTERS if name in changes]
        if parameters.is_greedy and idle:
            notice(
                f"notice: {', '.join(idle)} changes nothing at temperature 0 (greedy): give --temperature too"
            )
        return parameters

    def check(self) -> None:
        """Refuse values out of range now rather than after the model has been loaded."""
        from paceline.sampling import SamplingParameters

        SamplingParameters().updated(self._plain_changes())
        if self.json_schema is not None:
            _grammar(self.json_schema)

    def _plain_changes(self) -> dict[str, object]:
        """Options given by the user that SamplingParameters takes as they are."""
        names = [field.name for field in fields(self) if field.name not in _TRANSLATED]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _grammar(path: Path) -> Grammar:
    """The schema in a file."""
    from paceline.grammar import Grammar

    try:
        schema = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"--json-schema {str(path)!r} cannot be read as JSON: {error}") from None
    return Grammar.json_schema(schema)


def _bias(text: str) -> tuple[int, float]:
    """Read `ID=AMOUNT`."""
    token_id, _, amount = text.partition("=")
    try:
        return int(token_id), float(amount)
    except ValueError:
        raise RequestError(f"--logit-bias is {text!r}: write ID=AMOUNT, for example 42=-5") from None


def _token_sequences(words: list[str], generator: Generator) -> tuple[tuple[int, ...], ...]:
    """Ids of each word as it starts a text and as it follows a space: these are different tokens."""
    sequences = []
    for word in words:
        for form in dict.fromkeys((word, " " + word)):
            ids = generator.tokenizer(form, add_special_tokens=False)["input_ids"]
            sequences.append(tuple(int(i) for i in ids))
    return tuple(dict.fromkeys(sequences))
