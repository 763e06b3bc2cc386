"""lm-evaluation-harness with paceline: `python -m paceline.integrations.lm_eval --model paceline ...`.

The harness (lm-eval 0.4.13) knows the models in its own table and those registered before it looks; it loads
no plugins. Importing this module registers `paceline`, and running it registers and starts the harness's own
command line. In a program, import it before `lm_eval.simple_evaluate(model="paceline", ...)`, or give that a
`PacelineLM`.

Prompts and continuations are tokenised, cut and windowed as the harness's `hf` model does it, so that both
agree. Log-likelihoods are the target's own, whatever drafts or verifies.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from time import perf_counter
from typing import Any

import torch

from paceline.config import AUTO_WIDTH, DTYPES, nearest_name
from paceline.engine.generator import GenerationResult, Generator
from paceline.engine.load import load
from paceline.errors import ConfigError, MissingDependencyError, PacelineError, RequestError
from paceline.integrations.continuations import Continuation, score_continuations
from paceline.integrations.evaluation_options import EvaluationRequest, cut_answer, read_generation_kwargs
from paceline.integrations.speed_record import SpeedRecord
from paceline.registry import verifier_class
from paceline.relaxation import DEFAULT_RELAXATION, Relaxation

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from tqdm import tqdm
except ImportError as error:
    raise MissingDependencyError("evaluations need lm-evaluation-harness: pip install lm-eval") from error

MODEL_NAME = "paceline"
DEFAULT_DEVICE = "cuda:0"
"""The harness's command line says this when nobody says anything, on machines without CUDA too."""
DEFAULT_BATCH_SIZE = 16
"""Of the harness's `auto`."""
_BATCHES_PER_CALL = 8
# Below the harness's own logger: that is the one whose lines are shown.
_logger = logging.getLogger("lm_eval.paceline")


class PacelineLM(TemplateLM):  # type: ignore[misc]
    """A model of the harness that paceline decodes for.

    Args:
        target: alias, folder, GGUF file or Hub id.
        pretrained: the same by the name that other models of the harness use.
        generator: one that is loaded already, instead of all options of loading.
        drafter: registered drafter; None drafts nothing.
        head: folder of a trained head.
        verifier: registered verifier; lossless by default.
        num_speculative_tokens: most drafted tokens a round, or `auto`.
        dtype: as in `paceline.load`, or by torch's name (`float32`).
        device: as in `paceline.load`; the harness's default means `auto`.
        execution: likewise.
        trust_remote_code: run code of the model's repository.
        batch_size: requests decoded at once; `auto` is 16.
        max_batch_size: most of them.
        max_length: most tokens of context and answer; by default the target's context.
        add_bos_token: begin every text with the start token, or never; the tokenizer decides by default.
        prefix_token_id: stands in front of texts without context.
        enable_thinking: for chat templates that know it.
        think_end_token: what stands in front of it is no part of the answer.
        chat_template_args: further arguments of the chat template.
        limits: of a lossy verifier, fields of `paceline.Relaxation`.

    Raises:
        PacelineError: the model cannot be loaded, or an option is wrong.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        pretrained: str | None = None,
        generator: Generator | None = None,
        drafter: str | None = "phrase",
        head: str | None = None,
        verifier: str | None = None,
        num_speculative_tokens: int | str = AUTO_WIDTH,
        dtype: str = "auto",
        device: str | None = None,
        execution: str = "auto",
        trust_remote_code: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        super().__init__()
        self.batch_size = _read_batch_size(batch_size, max_batch_size)
        chosen = (drafter, num_speculative_tokens, str(dtype), execution)
        is_chosen = chosen != ("phrase", AUTO_WIDTH, "auto", "auto")
        if generator is not None and (target or pretrained or head or verifier or is_chosen):
            raise ConfigError(
                "the generator is loaded already: leave out target, head, verifier, drafter, "
                "num_speculative_tokens, dtype and execution"
            )
        self._relaxation = _read_limits(generator.verifier if generator else verifier, limits)
        names = {torch_name: name for name, torch_name in DTYPES.items()}
        if generator is None:
            if (target is None) == (pretrained is None):
                raise ConfigError("give the model once: target=smollm2 (or pretrained=)")
            generator = load(
                target or pretrained,
                drafter=drafter or "none",
                head=head,
                verifier=verifier,
                num_speculative_tokens=num_speculative_tokens,
                dtype=names.get(str(dtype), str(dtype)),
                device="auto" if device in (None, DEFAULT_DEVICE) else device,
                execution=execution,
                trust_remote_code=trust_remote_code,
                max_batch_size=self.batch_size,
            )
        self.generator = generator
        self.tokenizer = generator.tokenizer
        self.max_length = _read_max_length(max_length, generator.target.context_len)
        self.speed = SpeedRecord()
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._think_end_token = None if think_end_token is None else str(think_end_token)
        self._chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._chat_template_args["enable_thinking"] = enable_thinking

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.generator.target.device

    @property
    def eot_token_id(self) -> int:
        """End of a text."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ConfigError("the tokenizer has no end-of-sequence token: give prefix_token_id")
        return int(end)

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of a text without context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task says nothing."""
        return read_generation_kwargs(self.generator, {}).max_new_tokens

    @property
    def tokenizer_name(self) -> str:
        """Tells apart the caches of requests that a chat template has shaped."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation; without the system turn where the template does not take one."""
        from jinja2.exceptions import TemplateError

        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._chat_template_args,
        }
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **options))
        except TemplateError:
            _logger.warning("the chat template fails: once more without the system turn")
            turns = [turn for turn in chat_history if turn["role"] != "system"]
            return str(self.tokenizer.apply_chat_template(turns, **options))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; a start token that it begins with is not put in front once more."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        return self._encode(string, add_special_tokens)

    def _encode(self, string: str, add_special_tokens: bool | None) -> list[int]:
        wanted = self._add_bos_token if add_special_tokens is None else add_special_tokens
        options = {} if wanted is None else {"add_special_tokens": wanted}
        return [int(i) for i in self.tokenizer.encode(string, **options)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer prompts, the longest first."""
        asked = [read_generation_kwargs(self.generator, request.args[1]) for request in requests]
        prompts = [
            self._prompt_ids(request.args[0], own) for request, own in zip(requests, asked, strict=True)
        ]
        order = sorted(range(len(requests)), key=lambda i: -len(prompts[i]))
        answers: dict[int, str] = {}
        step = self.batch_size * _BATCHES_PER_CALL
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Answering with paceline") as bar:
            for first in range(0, len(order), step):
                some = order[first : first + step]
                results = self._generate([prompts[i] for i in some], [asked[i] for i in some])
                for i, result in zip(some, results, strict=True):
                    answers[i] = self._answer(result, asked[i])
                    self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
                bar.update(len(some))
        if requests:
            _logger.info("%s", self.speed)
        return [answers[i] for i in range(len(requests))]

    def _prompt_ids(self, context: str, asked: EvaluationRequest) -> list[int]:
        """Ids of a prompt, cut from the left until the answer has room."""
        room = self.max_length - asked.max_new_tokens
        if room < 1:
            raise RequestError(
                f"max_gen_toks is {asked.max_new_tokens}, the context {self.max_length}: give at most "
                f"{self.max_length - 1}"
            )
        start = self.tokenizer.bos_token
        has_start = start is not None and context.startswith(start)
        ids = self._encode(context, False if has_start else None)
        if len(ids) > room:
            _logger.warning("a prompt of %d tokens is cut to its last %d", len(ids), room)
        return ids[-room:]

    def _generate(self, prompts: Seq[list[int]], asked: Seq[EvaluationRequest]) -> list[GenerationResult]:
        """Decode some prompts and remember how fast that was."""
        own_end = self.tokenizer.eos_token_id
        eos = (*sorted(self.generator.eos_token_ids | ({own_end} - {None})),)
        parameters = [
            replace(own.parameters, eos_token_ids=eos, relaxation=self._relaxation, seed=self._seed(own))
            for own in asked
        ]
        started = perf_counter()
        results = self.generator.generate_batch(prompts, parameters)
        self.speed.add(results, perf_counter() - started)
        return results

    def _seed(self, asked: EvaluationRequest) -> int | None:
        """From torch's global generator, which the harness seeds; greedy requests leave it alone."""
        return None if asked.parameters.is_greedy else int(torch.randint(2**63 - 1, ()))

    def _answer(self, result: GenerationResult, asked: EvaluationRequest) -> str:
        """Text of an answer, decoded and cut as the harness's `hf` model does it."""
        text = self.tokenizer.decode(list(result.token_ids), skip_special_tokens=True)
        end = self.tokenizer.eos_token
        return cut_answer(text, asked.until if end is None else (*asked.until, end), self._think_end_token)

    def _loglikelihood_tokens(
        self, requests: Seq[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations of contexts, both given as ids; what is too long loses its beginning."""
        continuations = []
        for _texts, context_ids, token_ids in requests:
            if len(token_ids) > self.max_length:
                raise RequestError(
                    f"a continuation has {len(token_ids)} tokens: at most {self.max_length} fit the context"
                )
            room = self.max_length + 1 - len(token_ids)
            if len(context_ids) > room:
                _logger.warning("a context of %d tokens is cut to its last %d", len(context_ids), room)
            continuations.append(Continuation(tuple(context_ids[-room:]), tuple(token_ids)))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring with paceline") as bar:
            scores = score_continuations(
                self.generator.target, continuations, num_lanes=self.batch_size, on_scored=bar.update
            )
        answers = [(score.log_prob, score.is_greedy) for score in scores]
        for request, answer in zip(requests, answers, strict=True):
            # Windows of a long text have no texts of their own.
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts; long ones in windows that each fill the context."""
        windows: list[tuple[None, list[int], list[int]]] = []
        num_windows = []
        for request in requests:
            pairs = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [utils.make_disjoint_window(pair) for pair in pairs]
            windows += [(None, context_ids, token_ids) for context_ids, token_ids in own]
            num_windows.append(len(own))
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(scored)[0] for _ in range(count)) for count in num_windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results, the speculative figures among it."""
        target = self.generator.target
        info: dict[str, Any] = {"model_dtype": str(target.dtype), "paceline": self.speed.as_dict()}
        model = getattr(target, "model", None)
        if model is not None:
            info["model_num_parameters"] = model.num_parameters()
        return info


def _read_batch_size(batch_size: int | str, most: int | None) -> int:
    """Requests decoded at once; the harness's `auto` and `auto:N` are a fixed number here."""
    text = str(batch_size)
    if text == "auto" or text.startswith("auto:"):
        return most or DEFAULT_BATCH_SIZE
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"batch_size is {batch_size!r}: give a whole number of at least 1, or 'auto'")
    return min(int(text), most or int(text))


def _read_limits(verifier: str | None, limits: Mapping[str, Any]) -> Relaxation:
    """Limits of a lossy verifier; whatever else is left among the model's arguments is unknown."""
    if not limits:
        return DEFAULT_RELAXATION
    known = [*inspect.signature(PacelineLM).parameters, *(field.name for field in fields(Relaxation))]
    for name in limits:
        if name not in known:
            raise ConfigError(f"unknown model argument {name!r}: did you mean {nearest_name(name, known)!r}?")
    if verifier is None or verifier_class(verifier).lossless:
        raise ConfigError(f"{', '.join(limits)}: only lossy verifiers have limits; give verifier=budgeted")
    return DEFAULT_RELAXATION.updated(limits)


def _read_max_length(max_length: int | None, context_len: int) -> int:
    if max_length is None:
        return context_len
    if not 2 <= max_length <= context_len:
        raise ConfigError(f"max_length is {max_length}: it must be between 2 and the context, {context_len}")
    return max_length


def register() -> None:
    """Make `paceline` known to the harness of this process; more than once does no harm."""
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target="paceline.integrations.lm_eval:PacelineLM")


def main() -> None:
    """The harness's command line, with `--model paceline`."""
    from lm_eval.__main__ import cli_evaluate

    register()
    try:
        cli_evaluate()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        raise SystemExit(2) from error


register()

if __name__ == "__main__":
    main()
