"""`custom_generate="examples/hub_custom_generate"` against plain `model.generate`: tiny models, fp32."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import pickle
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from transformers import dynamic_module_utils
from transformers.utils.versions import require_version

import paceline
from paceline.errors import ConfigError, UnsupportedFeatureError
from paceline.testing import TINY_VOCAB, tiny_model, tiny_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "hub_custom_generate"
ATTRIBUTE = "_paceline_generators"


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch, tmp_path_factory):
    """transformers copies the file into a cache of modules and imports it from there."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))


@pytest.fixture
def model():
    return tiny_model("llama")


def inputs_of(*rows):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def repetitive_ids(length=24):
    return [5 + i % 4 for i in range(length)]


def generate_from_folder(model, folder=FOLDER, **options):
    options = {"tokenizer": tiny_tokenizer(), "num_speculative_tokens": 8, **options}
    return model.generate(**options, custom_generate=str(folder), trust_remote_code=True)


def generators_of(model):
    return list(getattr(model, ATTRIBUTE, {}).values())


# --- the same tensor as plain generate


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_greedy_batch_equals_plain_generate(architecture):
    model = tiny_model(architecture)
    options = {**inputs_of(repetitive_ids(), [7, 8, 9]), "max_new_tokens": 24, "eos_token_id": None}
    assert torch.equal(generate_from_folder(model, **options), model.generate(**options))


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "phrase", "eagle3:full"])
def test_ids_do_not_depend_on_the_drafter(target_of, phrase_head_of, eagle_head_of, drafter):
    model = target_of("llama").model
    heads = {"phrase": phrase_head_of, "eagle3:full": eagle_head_of}
    options = {**inputs_of([5, 6, 7, 8, 9]), "max_new_tokens": 24, "eos_token_id": None}
    head = {"head": str(heads[drafter]("llama"))} if drafter in heads else {}
    try:
        ours = generate_from_folder(model, **options, drafter=drafter, **head)
        (generator,) = generators_of(model)
    finally:
        # The model is shared with other tests.
        delattr(model, ATTRIBUTE)
    assert torch.equal(ours, model.generate(**options))
    assert type(generator.drafter).__module__.startswith("paceline.drafters.")


def test_drafts_are_accepted(model):
    options = {**inputs_of(repetitive_ids()), "max_new_tokens": 64, "eos_token_id": None}
    drafted = model.generate(**options)
    row = drafted[0].tolist()
    # The answer is in the prompt, so prompt lookup knows it.
    again = {**inputs_of([*row, *row[:24]]), "max_new_tokens": 16, "eos_token_id": None}
    plain = model.generate(**again)
    assert torch.equal(generate_from_folder(model, **again), plain)
    (generator,) = generators_of(model)
    assert generator.engine.budget.max_nodes == 8


def test_config_objects_and_positional_inputs_count(model):
    config = transformers.GenerationConfig(max_new_tokens=9, repetition_penalty=1.5, eos_token_id=95)
    ids = inputs_of([5, 6, 7])["input_ids"]
    ours = model.generate(
        ids, config, custom_generate=str(FOLDER), trust_remote_code=True, tokenizer=tiny_tokenizer()
    )
    assert torch.equal(ours, model.generate(ids, config))


def test_sampling_repeats_with_a_seed(model):
    options = {**inputs_of([5, 6, 7]), "max_new_tokens": 12, "do_sample": True, "eos_token_id": None}
    first, second, other = (generate_from_folder(model, **options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_stop_strings_end_rows_as_in_plain_generate(model):
    tokenizer = tiny_tokenizer()
    options = {**inputs_of([5, 6, 7]), "max_new_tokens": 24, "eos_token_id": None}
    text = tokenizer.decode(model.generate(**options)[0, 3:])
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    plain = model.generate(**options, stop_strings=[stop], tokenizer=tokenizer)
    assert plain.shape[1] < 27
    assert torch.equal(
        generate_from_folder(model, **options, stop_strings=[stop], tokenizer=tokenizer), plain
    )
    config = transformers.GenerationConfig(max_new_tokens=24, eos_token_id=None, stop_strings=[stop])
    ours = generate_from_folder(model, **inputs_of([5, 6, 7]), generation_config=config, tokenizer=tokenizer)
    assert torch.equal(ours, plain)
    assert config.stop_strings == [stop]
    # Those that the model itself was saved with.
    own = model.generation_config
    try:
        model.generation_config = config
        ours = generate_from_folder(model, **inputs_of([5, 6, 7]), tokenizer=tokenizer)
    finally:
        model.generation_config = own
    assert torch.equal(ours, plain)


def test_streamer_gets_the_text(model, capsys):
    tokenizer = tiny_tokenizer()
    options = {**inputs_of([5, 6, 7]), "max_new_tokens": 12, "eos_token_id": None}
    model.generate(**options, streamer=transformers.TextStreamer(tokenizer))
    expected = capsys.readouterr().out
    generate_from_folder(model, **options, streamer=transformers.TextStreamer(tokenizer))
    assert capsys.readouterr().out == expected != ""


def test_arguments_that_locate_the_file_are_not_the_models(model):
    options = {**inputs_of([5, 6, 7]), "max_new_tokens": 6}
    ours = generate_from_folder(model, **options, revision="main", token=False, local_files_only=True)
    assert torch.equal(ours, model.generate(**options))


# --- one Generator per model


def test_makes_one_generator_per_model_and_choice(model):
    options = {**inputs_of([5, 6, 7]), "max_new_tokens": 4}
    generate_from_folder(model, **options)
    generate_from_folder(model, **options)
    (first,) = generators_of(model)
    generate_from_folder(model, **options, drafter="none")
    generate_from_folder(model, **options)
    assert len(generators_of(model)) == 2
    assert generators_of(model)[0] is first
    assert first.target.model is model


def test_generators_go_with_the_model():
    model = tiny_model("llama")
    generate_from_folder(model, **inputs_of([5, 6, 7]), max_new_tokens=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_converted_model_gets_a_new_generator(model):
    options = {**inputs_of([5, 6, 7]), "max_new_tokens": 4}
    generate_from_folder(model, **options)
    (before,) = generators_of(model)
    model.double()
    assert torch.equal(generate_from_folder(model, **options), model.generate(**options))
    (after,) = generators_of(model)
    assert after is not before


def test_copies_of_a_model_start_without_generators(model):
    options = {**inputs_of([5, 6, 7]), "max_new_tokens": 4}
    generate_from_folder(model, **options)
    assert not generators_of(copy.deepcopy(model))
    assert not generators_of(pickle.loads(pickle.dumps(model)))
    twin = copy.deepcopy(model)
    assert torch.equal(generate_from_folder(twin, **options), generate_from_folder(model, **options))
    assert generators_of(twin)[0].target.model is twin


# --- how the folder is found


def test_a_model_folder_with_the_file_replaces_generate(tmp_path, model):
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "custom_generate")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    options = {**inputs_of([5, 6, 7]), "max_new_tokens": 12, "eos_token_id": None}
    ours = loaded.generate(options.pop("input_ids"), **options)
    # The tokenizer is found beside the weights.
    (generator,) = generators_of(loaded)
    assert len(generator.tokenizer) == TINY_VOCAB
    assert torch.equal(ours, model.generate(**inputs_of([5, 6, 7]), max_new_tokens=12, eos_token_id=None))


def test_without_trust_nothing_runs(model):
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(
            **inputs_of([5, 6, 7]), custom_generate=str(FOLDER), trust_remote_code=False, tokenizer=None
        )
    assert not generators_of(model)


def test_names_the_package_that_is_missing(model, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(dynamic_module_utils.importlib.metadata, "version", version)
    with pytest.raises(ImportError, match="paceline"):
        generate_from_folder(model, **inputs_of([5, 6, 7]))


def test_requirements_hold_for_this_package():
    for line in (FOLDER / "custom_generate" / "requirements.txt").read_text("utf-8").split():
        require_version(line)


def test_a_model_without_a_tokenizer_says_what_to_give(model):
    with pytest.raises(ConfigError, match="give generate tokenizer="):
        generate_from_folder(model, **inputs_of([5, 6, 7]), tokenizer=None)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_beams": 2}, UnsupportedFeatureError),
        ({"drafter": "prompt_lockup"}, ConfigError),
        ({"assistant_model": object()}, Exception),
        ({"max_new_tokns": 3}, ValueError),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused(model, options, error):
    with pytest.raises(error):
        generate_from_folder(model, **inputs_of([5, 6, 7]), **options)


def test_the_file_uses_public_names_only():
    text = (FOLDER / "custom_generate" / "generate.py").read_text("utf-8")
    assert "from paceline" not in text
    assert hasattr(paceline, "custom_generate")
