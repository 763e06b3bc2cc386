"""The harness's model `paceline` against its own `hf` on the same tiny model, fp32; needs lm-eval."""

from __future__ import annotations

import json
import logging
import runpy
import sys
from pathlib import Path

import pytest
import torch

from paceline.engine.generator import Generator
from paceline.errors import ConfigError, MissingDependencyError, RequestError, UnsupportedFeatureError
from paceline.integrations.evaluation_options import read_generation_kwargs
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import ReplayDrafter, tiny_model, tiny_tokenizer

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    from paceline.integrations.lm_eval import PacelineLM, main, register

    HAS_LM_EVAL = True
except (ImportError, MissingDependencyError):
    HAS_LM_EVAL = False

needs_lm_eval = pytest.mark.skipif(not HAS_LM_EVAL, reason="lm-eval is not installed: pip install lm-eval")
EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluate_with_lm_eval.py"
TEXTS = ["the cat and the hat ", "a tin in the inn", "one, two, three", "anther ", "the the the the the the"]


@pytest.mark.skipif(HAS_LM_EVAL, reason="lm-eval is installed")
def test_says_what_to_install():
    with pytest.raises(MissingDependencyError, match="pip install lm-eval"):
        import paceline.integrations.lm_eval  # noqa: F401


def make_tokenizer(adds_start=False):
    tokenizer = tiny_tokenizer()
    if adds_start:
        from tokenizers.processors import TemplateProcessing

        tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


class Pair:
    """paceline and `hf` on the same model."""

    def __init__(self, architecture="llama", adds_start=False, recorded=None, **options):
        model = tiny_model(architecture)
        drafter = ReplayDrafter(recorded or {}, 5, wrong=3, decoys=True)
        target = HuggingFaceTarget(model, check=False)
        generator = Generator(
            target,
            make_tokenizer(adds_start),
            drafter,
            num_speculative_tokens=24,
            eos_token_ids=[model.config.eos_token_id],
            max_batch_size=4,
        )
        self.ours = PacelineLM(generator=generator, **options)
        shared = {name: options[name] for name in ("max_length", "add_bos_token") if name in options}
        self.theirs = HFLM(
            pretrained=model,
            tokenizer=make_tokenizer(adds_start),
            batch_size=options.get("batch_size", 1),
            device="cpu",
            **shared,
        )

    def both(self, kind, *arguments):
        """What each answers."""
        requests = [
            Instance(request_type=kind, doc={}, arguments=argument, idx=i)
            for i, argument in enumerate(arguments)
        ]
        answers = [getattr(lm, kind)(requests, disable_tqdm=True) for lm in (self.ours, self.theirs)]
        return answers[0], answers[1]


def assert_same_scores(ours, theirs):
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs):
        assert own[0] == pytest.approx(other[0], abs=1e-4)
        assert own[1] == other[1]


PAIRS = [
    *[(text, tail) for text in TEXTS for tail in (" an", "d", " in the", "\nA", " ")],
    *[(text + "  ", "x") for text in TEXTS],
    ("", "the cat"),
    ("", "<s>the cat"),
    ("<s>the cat", " and"),
]

if HAS_LM_EVAL:

    @pytest.fixture(scope="module")
    def pair():
        return Pair()


# --- the same answers as `hf`


@needs_lm_eval
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("architecture", "adds_start"), [("llama", False), ("gemma2", True), ("gpt2", True)])
def test_log_likelihoods_equal_those_of_hf(architecture, adds_start, batch_size):
    pair = Pair(architecture, adds_start, batch_size=batch_size)
    assert_same_scores(*pair.both("loglikelihood", *PAIRS))


@needs_lm_eval
@pytest.mark.parametrize("options", [{"max_length": 12}, {"max_length": 12, "add_bos_token": True}], ids=str)
def test_long_contexts_lose_their_beginning_as_in_hf(options):
    pair = Pair(adds_start=True, **options)
    assert_same_scores(
        *pair.both("loglikelihood", *[(TEXTS[0] * 4 + tail, " an") for tail in ("", "in", "x")])
    )


@needs_lm_eval
@pytest.mark.parametrize("adds_start", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rolling_log_likelihoods_equal_those_of_hf(adds_start, batch_size):
    pair = Pair(adds_start=adds_start, batch_size=batch_size, max_length=16)
    ours, theirs = pair.both("loglikelihood_rolling", *[(text * 3,) for text in TEXTS], ("a",))
    assert ours == pytest.approx(theirs, abs=1e-4)


@needs_lm_eval
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_answers_equal_those_of_hf(architecture, batch_size):
    pair = Pair(architecture, batch_size=batch_size)
    asked = [(text, {"until": ["\n\n"], "max_gen_toks": 24}) for text in TEXTS]
    free, _ = pair.both("generate_until", *asked)
    # Now strings that occur, of one token and of several, inside an answer and at its end.
    stops = [[text[2:4]] if len(text) > 4 else [] for text in free]
    stops = [*stops, [free[0][5:9], free[0][3:4]], "e"]
    asked = [
        (text, {"until": until, "max_gen_toks": 20, "do_sample": False})
        for text, until in zip([*TEXTS, *TEXTS[:2]], stops)
        if until
    ]
    ours, theirs = pair.both("generate_until", *asked)
    assert ours == theirs
    assert any(text != whole[: len(text)] or len(text) < len(whole) for text, whole in zip(ours, free))


@needs_lm_eval
def test_drafted_answers_equal_those_of_hf():
    plain = Pair()
    ids = [plain.ours.tok_encode(text) for text in TEXTS]
    recorded = {tuple(own): plain.ours.generator.generate(own, plain_parameters(24)).token_ids for own in ids}
    pair = Pair(recorded=recorded, batch_size=2)
    ours, theirs = pair.both("generate_until", *[(text, {"until": [], "max_gen_toks": 24}) for text in TEXTS])
    assert ours == theirs
    assert pair.ours.speed.as_dict()["mean_acceptance_length"] > 2


def plain_parameters(num_tokens):
    from paceline.sampling import SamplingParameters

    return SamplingParameters(max_new_tokens=num_tokens, eos_token_ids=())


@needs_lm_eval
def test_long_prompts_lose_their_beginning_as_in_hf():
    pair = Pair(max_length=20)
    ours, theirs = pair.both(
        "generate_until", *[(text * 3, {"until": "e", "max_gen_toks": 8}) for text in TEXTS]
    )
    assert ours == theirs


@needs_lm_eval
def test_chat_templates_equal_those_of_hf(pair):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}]
    for history, starts in ((turns[:1], True), (turns, False)):
        assert pair.ours.apply_chat_template(history, starts) == pair.theirs.apply_chat_template(
            history, starts
        )
    assert pair.ours.chat_template(True) == pair.theirs.chat_template(True)
    assert pair.ours.tokenizer_name == pair.theirs.tokenizer_name


@needs_lm_eval
def test_chat_template_that_refuses_system_turns(pair, monkeypatch):
    monkeypatch.setattr(
        pair.ours.tokenizer,
        "chat_template",
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}",
    )
    turns = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    assert pair.ours.apply_chat_template(turns) == "hello"


@needs_lm_eval
def test_thinking_is_cut_off_and_announced():
    pair = Pair(think_end_token="e", enable_thinking=False)
    ours, _ = pair.both("generate_until", (TEXTS[0], {"until": [], "max_gen_toks": 24}))
    whole, _ = Pair().both("generate_until", (TEXTS[0], {"until": [], "max_gen_toks": 24}))
    assert ours == [whole[0].split("e")[-1].lstrip()]
    pair.ours.tokenizer.chat_template = "{{ enable_thinking }}"
    assert pair.ours.apply_chat_template([{"role": "user", "content": "x"}]) == "False"


@needs_lm_eval
def test_sampling_repeats_with_the_harness_seed_and_differs_between_requests(pair):
    request = (TEXTS[0], {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.0})
    instances = [Instance(request_type="generate_until", doc={}, arguments=request, idx=i) for i in range(3)]
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(pair.ours.generate_until(instances, disable_tqdm=True))
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


# --- options


@needs_lm_eval
@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"num_beams": 3}, UnsupportedFeatureError),
        ({"max_gen_tokens": 3}, UnsupportedFeatureError),
        ({"max_gen_toks": 256}, RequestError),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused(pair, kwargs, error):
    with pytest.raises(error):
        pair.ours.generate_until(
            [Instance(request_type="generate_until", doc={}, arguments=("a", kwargs), idx=0)]
        )


@needs_lm_eval
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "give the model once"),
        ({"target": "a", "pretrained": "b"}, "give the model once"),
        ({"target": "a", "draftr": "phrase"}, "did you mean 'drafter'"),
        ({"target": "a", "risk_budget": 3.0}, "verifier=budgeted"),
        ({"target": "a", "batch_size": 0}, "batch_size is 0"),
        ({"target": "a", "drafter": "phrse"}, "did you mean 'phrase'"),
    ],
    ids=str,
)
def test_wrong_model_arguments_are_named(options, match):
    with pytest.raises(ConfigError, match=match):
        PacelineLM(**options)


@needs_lm_eval
def test_limits_of_lossy_verifiers_reach_the_requests(pair):
    made = pair.ours.generator
    lossy = Generator(made.target, made.tokenizer, made.drafter, verifier="budgeted")
    lm = PacelineLM(generator=lossy, risk_budget=3.0, batch_size="auto")
    asked = read_generation_kwargs(lossy, {"max_gen_toks": 4})
    seen = []
    generate_batch = lossy.generate_batch
    lossy.generate_batch = lambda prompts, parameters: (
        seen.extend(parameters) or generate_batch(prompts, parameters)
    )
    lm._generate([[5, 6]], [asked])
    assert seen[0].relaxation.risk_budget == 3.0
    assert lm.batch_size == 16
    with pytest.raises(ConfigError, match="verifier=budgeted"):
        PacelineLM(generator=made, risk_budget=3.0)
    with pytest.raises(ConfigError, match="leave out"):
        PacelineLM("smollm2", generator=made)


# --- inside the harness


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@needs_lm_eval
def test_is_registered_under_its_name():
    register()
    assert get_model("paceline") is PacelineLM


@needs_lm_eval
def test_example_agrees_with_hf(model_folder, capsys):
    runpy.run_path(str(EXAMPLE))["main"]([str(model_folder), "--compare", "--drafter", "prompt_lookup"])
    output = capsys.readouterr().out
    assert "same answers: True" in output
    assert "same log-likelihoods: True" in output
    assert "mean acceptance length" in output


@needs_lm_eval
def test_command_line_evaluates_and_reports(model_folder, tmp_path, monkeypatch, capsys, caplog):
    tasks = runpy.run_path(str(EXAMPLE))["write_tasks"](tmp_path / "tasks")
    arguments = f"pretrained={model_folder},drafter=none,dtype=float32"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *(
                "lm_eval",
                "run",
                "--model",
                "paceline",
                "--model_args",
                arguments,
                "--include_path",
                str(tasks),
            ),
            *("--tasks", "paceline_choice,paceline_answer", "--apply_chat_template", "--batch_size", "2"),
            *(
                "--output_path",
                str(tmp_path / "out"),
                "--log_samples",
                "--use_cache",
                str(tmp_path / "cache"),
            ),
        ],
    )
    logger = logging.getLogger("lm_eval.paceline")
    logger.addHandler(caplog.handler)
    try:
        main()
    finally:
        logger.removeHandler(caplog.handler)
    assert "mean acceptance length 1.00" in caplog.text
    assert "paceline_choice" in capsys.readouterr().out
    (report,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(report.read_text("utf-8"))["config"]
    assert config["paceline"]["num_output_tokens"] > 0
    assert config["paceline"]["mean_acceptance_length"] == 1.0
    assert config["model_num_parameters"] > 0


@needs_lm_eval
def test_command_line_says_errors_in_one_line(monkeypatch, tmp_path, capsys):
    tasks = runpy.run_path(str(EXAMPLE))["write_tasks"](tmp_path / "tasks")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("lm_eval", "run", "--model", "paceline", "--model_args", "target=no/such,draftr=none"),
            *("--include_path", str(tasks), "--tasks", "paceline_choice"),
        ],
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("paceline: unknown model argument 'draftr'")


@needs_lm_eval
def test_evaluates_a_generator_in_memory(pair, tmp_path):
    write_tasks = runpy.run_path(str(EXAMPLE))["write_tasks"]
    manager = lm_eval.tasks.TaskManager(include_path=str(write_tasks(tmp_path)), include_defaults=False)
    results = lm_eval.simple_evaluate(model=pair.ours, tasks=["paceline_text"], task_manager=manager)
    reference = lm_eval.simple_evaluate(model=pair.theirs, tasks=["paceline_text"], task_manager=manager)
    ours, theirs = (found["results"]["paceline_text"] for found in (results, reference))
    assert ours["word_perplexity,none"] == pytest.approx(theirs["word_perplexity,none"], rel=1e-4)
