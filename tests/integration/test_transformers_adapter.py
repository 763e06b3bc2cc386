"""`custom_generate=paceline.custom_generate` against plain `model.generate`: tiny models, fp32."""

from __future__ import annotations

import functools
import inspect
import runpy
from pathlib import Path

import pytest
import torch
import transformers

import paceline
from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.errors import ConfigError, RequestError, UnsupportedFeatureError
from paceline.sampling import SamplingParameters
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_VOCAB, ReplayDrafter, tiny_model, tiny_tokenizer

PAD = 0
ARCHITECTURES = ["llama", "llama-tied", "qwen3", "mistral-sliding", "gemma2", "gemma3"]
ARCHITECTURES += ["phi3", "gpt2", "gpt-neox"]


def left_padded(prompts):
    """Tensors as a tokenizer with `padding_side="left"` gives them."""
    longest = max(map(len, prompts))
    rows = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def random_prompts(*lengths, seed=3):
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(3, TINY_VOCAB, (length,), generator=source).tolist() for length in lengths]


def make_generator(model, recorded=None):
    """A Generator whose drafts are right up to the third token, among decoys."""
    drafter = ReplayDrafter(recorded or {}, 5, wrong=3, decoys=True)
    target = HuggingFaceTarget(model, check=False)
    return Generator(target, tiny_tokenizer(), drafter, num_speculative_tokens=24)


def recorded_rows(prompts, output):
    padded_len = max(map(len, prompts))
    return {tuple(prompt): row[padded_len:].tolist() for prompt, row in zip(prompts, output)}


def generate_with(generator, **options):
    return generator.target.model.generate(
        **options, custom_generate=paceline.custom_generate, paceline=generator
    )


def run_both(model, prompts, **options):
    """Plain output and ours, with drafts from the plain one."""
    options |= left_padded(prompts)
    plain = model.generate(**options)
    return plain, generate_with(make_generator(model, recorded_rows(prompts, plain)), **options)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def generator(llama):
    return make_generator(llama)


def call(model, generator, prompts=((5, 6, 7, 8),), **options):
    """One call with our callable."""
    options = {"max_new_tokens": 6, **left_padded([list(prompt) for prompt in prompts]), **options}
    return model.generate(**options, custom_generate=paceline.custom_generate, paceline=generator)


# --- the same tensor as plain generate


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_batch_with_left_padding_equals_plain_generate(architecture):
    model = tiny_model(architecture)
    plain, ours = run_both(model, random_prompts(6, 3, 9), max_new_tokens=24, eos_token_id=None)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_rows_that_end_early_are_padded_as_plain_generate_pads_them(architecture):
    model = tiny_model(architecture)
    prompts = random_prompts(6, 3, 9)
    endless = model.generate(**left_padded(prompts), max_new_tokens=20, eos_token_id=-1)[:, 9:].tolist()
    ends = [endless[0][4], endless[1][11]]
    plain, ours = run_both(model, prompts, max_new_tokens=20, eos_token_id=ends)
    lengths = {int((row != PAD).sum()) for row in plain[:, 9:]}
    assert len(lengths) > 1
    assert torch.equal(ours, plain)


def test_pads_with_the_first_end_id_when_there_is_no_pad_id():
    model = tiny_model("llama")
    model.generation_config.pad_token_id = None
    prompts = random_prompts(4, 4)
    endless = model.generate(**left_padded(prompts), max_new_tokens=12, eos_token_id=-1)[:, 4:].tolist()
    plain, ours = run_both(model, prompts, max_new_tokens=12, eos_token_id=endless[0][2])
    assert plain[0, -1] == endless[0][2]
    assert torch.equal(ours, plain)


# Each changes the text: bans are made from what plain decoding says.
PENALTIES = {
    "repetition": lambda bare: {"repetition_penalty": 1.3},
    "bias before penalty": lambda bare: {"repetition_penalty": 0.6, "sequence_bias": [[[bare[1]], -9.0]]},
    "n-grams": lambda bare: {"no_repeat_ngram_size": 2},
    "bad words": lambda bare: {"bad_words_ids": [bare[:1], bare[2:4], bare[9:12]]},
    "suppressed": lambda bare: {"suppress_tokens": [bare[0], bare[4], 2]},
    "all": lambda bare: {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [bare[:1]]},
}


@pytest.mark.parametrize("make_options", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("architecture", ["gemma2", "gpt-neox"])
def test_penalties_and_bans_equal_plain_generate(architecture, make_options):
    model = tiny_model(architecture)
    prompts = random_prompts(7, 7)
    bare = model.generate(**left_padded(prompts), max_new_tokens=24)
    options = make_options(bare[0, 7:].tolist())
    plain, ours = run_both(model, prompts, max_new_tokens=24, **options)
    assert torch.equal(ours, plain)
    assert plain[0, 7:31].tolist() != bare[0, 7:31].tolist()


def test_renormalised_logits_change_nothing(llama):
    plain, ours = run_both(llama, random_prompts(7), max_new_tokens=24, renormalize_logits=True)
    assert torch.equal(ours, plain)


def test_penalties_of_a_padded_row_are_those_of_the_row_alone():
    model = tiny_model("gemma2")
    short, long = random_prompts(4, 9)
    options = {"max_new_tokens": 16, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    alone, _ = run_both(model, [short], **options)
    _, batch = run_both(model, [short, long], **options)
    assert batch[0, 9:].tolist() == alone[0, 4:].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 12},
        {"min_new_tokens": 7},
        {"min_length": 14},
        {"min_new_tokens": 3, "max_length": 15},
    ],
    ids=str,
)
def test_length_limits_count_as_in_plain_generate(llama, options):
    prompts = random_prompts(6, 3)
    endless = llama.generate(**left_padded(prompts), max_new_tokens=20, eos_token_id=-1)[:, 6:].tolist()
    ends = [endless[0][1], endless[1][2]]
    limit = {} if "max_length" in options else {"max_new_tokens": 20}
    plain, ours = run_both(llama, prompts, eos_token_id=ends, **limit, **options)
    assert torch.equal(ours, plain)
    assert plain.shape[1] - 6 >= options.get("min_new_tokens", 1)


def test_default_length_limit_is_that_of_plain_generate(llama):
    plain, ours = run_both(llama, random_prompts(5), eos_token_id=None)
    assert torch.equal(ours, plain)


def test_processors_given_by_hand_are_honoured(llama):
    plain, ours = run_both(
        llama,
        random_prompts(6),
        max_new_tokens=16,
        logits_processor=transformers.LogitsProcessorList(
            [transformers.RepetitionPenaltyLogitsProcessor(1.4), transformers.NoRepeatNGramLogitsProcessor(2)]
        ),
    )
    assert torch.equal(ours, plain)
    assert not torch.equal(plain, llama.generate(**left_padded(random_prompts(6)), max_new_tokens=16))


def test_generation_config_object_counts(llama):
    config = transformers.GenerationConfig(max_new_tokens=9, repetition_penalty=1.5, eos_token_id=95)
    plain, ours = run_both(llama, random_prompts(6), generation_config=config)
    assert ours.shape == (1, 15)
    assert torch.equal(ours, plain)


def test_works_again_and_leaves_the_model_as_it_was(llama):
    inputs = left_padded(random_prompts(6, 4))
    before = llama.generate(**inputs, max_new_tokens=12)
    implementation = llama.config._attn_implementation
    generator = make_generator(llama)
    first, second = (generate_with(generator, **inputs, max_new_tokens=12) for _ in range(2))
    assert torch.equal(first, before)
    assert torch.equal(second, before)
    assert torch.equal(llama.generate(**inputs, max_new_tokens=12), before)
    assert llama.config._attn_implementation == implementation == "sdpa"
    assert not generator.engine.has_work


def test_weights_are_shared_with_the_model():
    model = tiny_model("llama")
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    generator = paceline.load(model=model, tokenizer=tiny_tokenizer(), drafter="none")
    generate_with(generator, **left_padded(random_prompts(6)), max_new_tokens=8)
    assert generator.target.model is model
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses


def test_more_rows_than_run_at_once_keep_their_order(llama):
    options = {**left_padded(random_prompts(4, 6, 5, 3, 6)), "max_new_tokens": 10, "eos_token_id": None}
    target = HuggingFaceTarget(llama, check=False)
    narrow = Generator(target, tiny_tokenizer(), NoDrafter(), max_batch_size=2)
    assert torch.equal(generate_with(narrow, **options), llama.generate(**options))


def test_returns_the_output_object_on_request(llama, generator):
    output = call(llama, generator, return_dict_in_generate=True)
    assert isinstance(output, transformers.generation.GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, call(llama, generator))
    assert output.scores is None


def test_stops_at_the_context_limit_and_says_so():
    model = tiny_model("gpt2-short")
    generator = make_generator(model)
    prompts = random_prompts(28, 25)
    with pytest.warns(UserWarning, match=r"rows \[0, 1\] stopped at the model's context of 32"):
        ours = generate_with(generator, **left_padded(prompts), max_new_tokens=16, eos_token_id=None)
    assert ours.shape == (2, 28 + 7)
    assert ours[0, 32:].tolist() == [PAD] * 3
    plain = model.generate(input_ids=torch.tensor([prompts[0]]), max_new_tokens=4, eos_token_id=None)
    assert ours[0, :32].tolist() == plain[0].tolist()


# --- sampling


def test_sampling_with_top_k_1_is_greedy(llama, generator):
    greedy = call(llama, generator, max_new_tokens=16)
    assert torch.equal(call(llama, generator, max_new_tokens=16, do_sample=True, top_k=1), greedy)


def test_filters_reach_the_verifier(llama, generator, monkeypatch):
    seen = []
    original = generator.open
    monkeypatch.setattr(generator, "open", lambda ids, own: (seen.append(own), original(ids, own))[1])
    call(llama, generator, do_sample=True, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=4)
    call(llama, generator, do_sample=True, top_k=0, seed=4)
    call(llama, generator, do_sample=False)
    assert [(p.temperature, p.top_k, p.top_p, p.min_p) for p in seen] == [
        (0.7, 20, 0.9, 0.05),
        (1.0, 0, 1.0, 0.0),
        (0.0, 0, 1.0, 0.0),
    ]


def test_first_row_of_a_seed_is_the_generators_own_text(llama, generator):
    ours = call(llama, generator, max_new_tokens=12, do_sample=True, top_k=0, eos_token_id=None, seed=11)
    own = generator.generate(
        [5, 6, 7, 8], SamplingParameters(max_new_tokens=12, temperature=1.0, eos_token_ids=(), seed=11)
    )
    assert ours[0, 4:].tolist() == list(own.token_ids)


def test_returned_sequences_of_a_seed_differ_and_are_the_same_again(llama, generator):
    options = {"do_sample": True, "top_k": 0, "temperature": 3.0, "eos_token_id": None, "max_new_tokens": 8}
    options |= {"num_return_sequences": 4, "prompts": [(5, 6, 7), (8, 9, 10)]}
    first = call(llama, generator, seed=1, **options)
    assert first.shape == (8, 11)
    assert first[:, :3].tolist() == [[5, 6, 7]] * 4 + [[8, 9, 10]] * 4
    assert len({tuple(row) for row in first[:4].tolist()}) == 4
    assert torch.equal(call(llama, generator, seed=1, **options), first)
    # The rows of the next seed are others: a seed is not the row number plus something.
    other = call(llama, generator, seed=2, **options)
    assert not {tuple(row) for row in first.tolist()} & {tuple(row) for row in other.tolist()}


def test_without_a_seed_torch_manual_seed_counts(llama, generator):
    options = {"do_sample": True, "top_k": 0, "temperature": 3.0, "max_new_tokens": 12, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first, second = call(llama, generator, **options), call(llama, generator, **options)
        torch.manual_seed(5)
        again = call(llama, generator, **options)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=str)
def test_torchs_global_generator_is_left_alone(llama, generator, options):
    before = torch.get_rng_state()
    call(llama, generator, **options)
    assert torch.equal(torch.get_rng_state(), before)


# --- own arguments: stop texts and streaming


def test_stop_text_ends_a_row_with_the_token_that_completes_it(llama, generator):
    tokenizer = tiny_tokenizer()
    free = call(llama, generator, max_new_tokens=20, eos_token_id=None)[0, 4:].tolist()
    stop = tokenizer.decode(free[5:7])
    assert stop
    assert stop not in tokenizer.decode(free[:6])
    ours = call(llama, generator, max_new_tokens=20, eos_token_id=None, stop_texts=stop)
    assert ours[0, 4:].tolist() == free[:7]


class RecordingStreamer:
    """Notes the calls that a streamer gets."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


def test_text_streamer_gets_the_calls_of_plain_generate(llama):
    prompts = random_prompts(5)
    theirs, ours = RecordingStreamer(), RecordingStreamer()
    options = {**left_padded(prompts), "max_new_tokens": 17, "eos_token_id": None}
    plain = llama.generate(**options, streamer=theirs)
    generator = make_generator(llama, recorded_rows(prompts, plain))
    assert torch.equal(generate_with(generator, **options, text_streamer=ours), plain)
    assert ours.calls == theirs.calls
    assert len(ours.calls) == 1 + 17 + 1


def test_text_streamer_may_be_transformers_own(llama, generator, capsys):
    tokenizer = tiny_tokenizer()
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
    output = call(llama, generator, max_new_tokens=12, text_streamer=streamer)
    assert capsys.readouterr().out == tokenizer.decode(output[0, 4:]) + "\n"


def test_text_streamer_follows_one_row_only(llama, generator):
    with pytest.raises(UnsupportedFeatureError, match="one row, not 2"):
        call(llama, generator, prompts=[(5, 6), (7, 8)], text_streamer=RecordingStreamer())


# --- refusals


class Bias(transformers.LogitsProcessor):
    """A processor that nobody knows."""

    def __call__(self, input_ids, scores):
        return scores


class MaxLengthCriteria(transformers.StoppingCriteria):
    """A namesake of one that is known."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.ones(input_ids.shape[0], dtype=torch.bool)


REFUSED = {
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "contrast": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "constraints": ({"force_words_ids": [[5]], "num_beams": 2}, "num_beams|force_words_ids"),
    "dola": ({"dola_layers": "low"}, "dola_layers='low'"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens=4.*paceline.load"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states"),
    "attentions": ({"output_attentions": True}, "output_attentions"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "foreign processor": ({"logits_processor": [Bias()]}, r"logits processor .*\.Bias"),
    "foreign criterion": ({"stopping_criteria": [MaxLengthCriteria()]}, r"criterion .*\.MaxLengthCriteria"),
    "time": ({"max_time": 5.0}, "MaxTimeCriteria"),
    "allowed tokens": (
        {"prefix_allowed_tokens_fn": lambda row, ids: [1]},
        "PrefixConstrainedLogitsProcessor",
    ),
    "guidance": ({"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
    "watermark": ({"watermarking_config": {"bias": 2.0}}, "WatermarkLogitsProcessor"),
    "forced end": ({"forced_eos_token_id": 2}, "ForcedEOSTokenLogitsProcessor"),
    "typical": ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper"),
    "bias of several tokens": ({"sequence_bias": [[[5, 6], 2.0]]}, r"several tokens, here \(5, 6\)"),
    "other end": (
        {"logits_processor": [transformers.MinLengthLogitsProcessor(9, 5)]},
        "MinLengthLogitsProcessor with eos_token_id",
    ),
    "prompt without penalty": (
        {"logits_processor": [transformers.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2)]},
        "prompt_ignore_length=2",
    ),
    "another order": (
        {
            "repetition_penalty": 1.2,
            "logits_processor": [transformers.SequenceBiasLogitsProcessor([[[5], 1.0]])],
        },
        "SequenceBiasLogitsProcessor after RepetitionPenaltyLogitsProcessor",
    ),
    "two temperatures": (
        {
            "do_sample": True,
            "temperature": 0.5,
            "logits_processor": [transformers.TemperatureLogitsWarper(0.5)],
        },
        "two TemperatureLogitsWarper",
    ),
    "soft filter": (
        {
            "do_sample": True,
            "top_k": 0,
            "logits_processor": [transformers.MinPLogitsWarper(0.1, min_tokens_to_keep=3)],
        },
        "MinPLogitsWarper with min_tokens_to_keep=3",
    ),
    "own positions": ({"position_ids": torch.tensor([[4, 5, 6, 7]])}, "position_ids"),
    "streamer": ({"streamer": RecordingStreamer()}, "streamer .*text_streamer"),
    "assistant": ({"assistant_model": "itself"}, "assistant_model .*drafter"),
}


@pytest.mark.parametrize(("options", "named"), REFUSED.values(), ids=REFUSED)
def test_refuses_by_name(llama, generator, options, named):
    options = {key: llama if value == "itself" else value for key, value in options.items()}
    if "stopping_criteria" in options:
        options["stopping_criteria"] = transformers.StoppingCriteriaList(options["stopping_criteria"])
    with pytest.raises(UnsupportedFeatureError, match=named):
        call(llama, generator, **options)
    assert not generator.engine.has_work


def test_refuses_a_streamer_behind_a_wrapper(llama, generator):
    partial = functools.partial(paceline.custom_generate, paceline=generator)
    with pytest.raises(UnsupportedFeatureError, match="text_streamer"):
        llama.generate(torch.tensor([[5, 6]]), custom_generate=partial, streamer=RecordingStreamer())


def test_stop_strings_are_an_error_as_long_as_transformers_drops_the_tokenizer(llama, generator):
    with pytest.raises(ValueError, match="stop strings"):
        call(llama, generator, stop_strings=["x"], tokenizer=tiny_tokenizer())


def cache_argument(model):
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def test_refuses_a_cache_that_holds_tokens(llama, generator):
    name = cache_argument(llama)
    cache = transformers.DynamicCache(config=llama.config)
    llama(input_ids=torch.tensor([[5, 6]]), **{name: cache}, use_cache=True)
    with pytest.raises(UnsupportedFeatureError, match=name):
        call(llama, generator, **{name: cache})


def test_refuses_embeddings_as_inputs(llama, generator):
    embeddings = llama.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    with pytest.raises(UnsupportedFeatureError, match="inputs_embeds"):
        generate_with(generator, inputs_embeds=embeddings, max_new_tokens=4)


def test_refuses_token_types_that_the_model_would_read():
    model = tiny_model("gpt2")
    with pytest.raises(UnsupportedFeatureError, match="token_type_ids"):
        call(model, make_generator(model), token_type_ids=torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]], ids=str)
def test_refuses_masks_that_are_not_left_padding(llama, generator, mask):
    masks = torch.tensor([[1, 1, 1, 1], mask])
    with pytest.raises(UnsupportedFeatureError, match="attention_mask of row 1"):
        call(llama, generator, prompts=[(5, 6, 7, 8), (5, 6, 7, 8)], attention_mask=masks)


def test_needs_a_pad_id_only_where_rows_may_differ_in_length():
    model = tiny_model("llama")
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    generator = make_generator(model)
    even = call(model, generator, prompts=[(5, 6), (7, 8)])
    assert torch.equal(even, model.generate(torch.tensor([[5, 6], [7, 8]]), max_new_tokens=6))
    with pytest.raises(RequestError, match="pad_token_id"):
        call(model, generator, prompts=[(5, 6), (7, 8)], stop_texts=["x"])


# --- the Generator


def test_asks_for_a_generator(llama):
    with pytest.raises(ConfigError, match=r"paceline\.load\(model=model"):
        llama.generate(torch.tensor([[5, 6]]), custom_generate=paceline.custom_generate)


def test_refuses_the_generator_of_another_model(generator):
    with pytest.raises(ConfigError, match="another model"):
        call(tiny_model("llama"), generator)


def test_refuses_a_model_that_has_changed_since():
    model = tiny_model("llama")
    generator = make_generator(model)
    model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"torch\.bfloat16 .*torch\.float32"):
        call(model, generator)


def test_refuses_a_model_in_training_mode():
    model = tiny_model("llama")
    generator = make_generator(model)
    model.train()
    with pytest.raises(ConfigError, match="training mode"):
        call(model, generator)


def test_signature_takes_no_name_of_the_models_own(llama):
    own = {"paceline", "stop_texts", "text_streamer", "seed"}
    parameters = inspect.signature(paceline.custom_generate).parameters
    sample = inspect.signature(transformers.GenerationMixin._sample).parameters
    assert set(parameters) - set(sample) == own | {"model"}
    assert not own & set(inspect.signature(llama.forward).parameters)


def test_example_gives_the_same_ids(tmp_path, capsys):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    example = Path(__file__).parents[2] / "examples" / "transformers_generate.py"
    runpy.run_path(str(example))["main"]([str(tmp_path), "the cat and the cat and the"])
    assert "same ids: True" in capsys.readouterr().out
