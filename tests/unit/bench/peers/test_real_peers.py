"""The rivals themselves on tiny models, where they are installed (`make peers`)."""

from __future__ import annotations

import psutil
import pytest
import torch

from paceline.bench.peers.economize import CYCLE_LENGTHS, EconomizeArm
from paceline.bench.peers.economize import check_package as check_economize
from paceline.bench.peers.line_process import PeerError
from paceline.bench.peers.llama_cpp import PRECISIONS, SCRIPT, LlamaCppArm, build_llama_cpp
from paceline.bench.peers.node_packages import check_package, find_node, packages_folder
from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.errors import MissingDependencyError
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import greedy_oracle, tiny_model, tiny_tokenizer

# Read before the tests get a cache folder of their own: packages are where `make peers` puts them.
PACKAGES = packages_folder()
REPEATING = [5, 6, 7, 8] * 4
PROMPTS = ([7], [5, 6, 7, 8, 9], REPEATING)
# Logits: llama.cpp rounds activations to bfloat16 too. Query rows left in the model's order make it 0.4.
ROUNDING = 0.05
LONG = [(11 * i * i + 3 * i) % 93 + 3 for i in range(700)]  # more than llama.cpp reads at once


def reason_without(check):
    """Why a rival cannot run here; empty where it can."""
    try:
        check()
    except MissingDependencyError as error:
        return str(error)
    return ""


def ids_of(arm, prompt, max_new_tokens):
    return list(arm.answer([prompt], max_new_tokens)[0].token_ids)


def largest_gap(model, prompt, ids):
    """By how many logits the ids fall short of the likeliest ones, at worst."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return float((logits.max(-1).values - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]).max())


def check_llama_cpp():
    find_node()
    check_package(PACKAGES)


NO_LLAMA_CPP, NO_ECONOMIZE = reason_without(check_llama_cpp), reason_without(check_economize)
needs_llama_cpp = pytest.mark.skipif(bool(NO_LLAMA_CPP), reason=NO_LLAMA_CPP or "is there")
needs_economize = pytest.mark.skipif(bool(NO_ECONOMIZE), reason=NO_ECONOMIZE or "is there")


@pytest.fixture(scope="module", params=["llama", "llama-tied"])
def model(request):
    """Weights that bfloat16 holds exactly, so that the file has the same ones."""
    model = tiny_model(request.param, max_position_embeddings=1024)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


@pytest.fixture
def arm_of(model, tokenizer, tmp_path, monkeypatch):
    """llama.cpp on that model."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))

    def make(name="llama.cpp", eos=(), tokenizer=tokenizer):
        # A file is named after the target, and these targets differ by what their tokenizer ends with.
        target = HuggingFaceTarget(model, fingerprint=f"{tokenizer.eos_token_id:016x}")
        generator = Generator(target, tokenizer, NoDrafter(), eos_token_ids=eos)
        return build_llama_cpp(name, generator, packages=PACKAGES)

    return make


@needs_llama_cpp
def test_llama_cpp_writes_the_models_likeliest_ids_and_keeps_nothing_between_prompts(arm_of, model):
    arm = arm_of()
    first, again = ([ids_of(arm, prompt, 12) for prompt in order] for order in (PROMPTS, PROMPTS[::-1]))
    assert again[::-1] == first
    for prompt, ids in zip(PROMPTS, first, strict=True):
        assert len(ids) == 12
        assert largest_gap(model, prompt, ids) <= ROUNDING


@needs_llama_cpp
def test_llama_cpp_reads_a_prompt_longer_than_its_batch(arm_of, model):
    assert largest_gap(model, LONG, ids_of(arm_of(), LONG, 4)) <= ROUNDING


@needs_llama_cpp
def test_llama_cpp_ends_with_our_end_of_sequence_and_not_with_the_files(arm_of, model):
    long = ids_of(arm_of(), PROMPTS[1], 12)
    eos = long[3]
    assert ids_of(arm_of(eos=(eos,)), PROMPTS[1], 12) == long[: long.index(eos) + 1]
    own = tiny_tokenizer()
    own.eos_token = own.convert_ids_to_tokens(eos)  # the file's end of text, and none for the engine
    assert ids_of(arm_of(tokenizer=own), PROMPTS[1], 12) == long


@needs_llama_cpp
@pytest.mark.parametrize("name", PRECISIONS)
def test_llama_cpp_describes_itself_and_ends_with_the_arm(name, arm_of):
    arm = arm_of(name)
    assert len(arm.answer([PROMPTS[1]], 5)[0].token_ids) == 5
    assert "node-llama-cpp 3.22.1, llama.cpp " in str(arm.description["software"])
    assert arm.description["weights"] == PRECISIONS[name]
    assert arm.description["threads"] == torch.get_num_threads()
    pid = arm._process._process.pid
    arm.close()
    assert not psutil.pid_exists(pid)


@needs_llama_cpp
def test_a_file_that_llama_cpp_cannot_load_is_one_clear_line(tmp_path, tokenizer):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(60))
    command = [find_node(), str(SCRIPT), str(PACKAGES), str(damaged), "1", "64"]
    with pytest.raises(PeerError, match="ended with 1: ") as caught:
        LlamaCppArm("llama.cpp", command, tokenizer, (), context_len=64, weights="bf16")
    message = str(caught.value)
    assert "\n" not in message
    assert ": at " not in message  # a line of a stack trace
    assert "Node.js" not in message  # with which node ends its own report


@needs_economize
@pytest.mark.parametrize("name", CYCLE_LENGTHS)
def test_economize_writes_the_oracles_ids_one_by_one_and_in_a_batch(name, model, tokenizer):
    arm = EconomizeArm(name, model, tokenizer, ())
    expected = [greedy_oracle(model, prompt, 12) for prompt in PROMPTS]
    assert [list(answer.token_ids) for answer in arm.answer(PROMPTS, 12)] == expected
    assert [list(arm.answer([prompt], 12)[0].token_ids) for prompt in PROMPTS] == expected


@needs_economize
@pytest.mark.parametrize("name", CYCLE_LENGTHS)
def test_economize_ends_with_the_end_of_sequence(name, model, tokenizer):
    long = greedy_oracle(model, PROMPTS[1], 12)
    eos = long[3]
    [answer] = EconomizeArm(name, model, tokenizer, (eos,)).answer([PROMPTS[1]], 12)
    assert list(answer.token_ids) == long[: long.index(eos) + 1]


@needs_economize
def test_economizes_lookup_reads_several_tokens_at_once(tokenizer):
    """Else the two arms would be one."""
    model = tiny_model("llama")
    # The next token follows from the last one alone: the text soon goes in circles.
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    forwards = {}
    for name in CYCLE_LENGTHS:
        count = []
        handle = model.model.layers[0].register_forward_pre_hook(lambda *_: count.append(1))  # noqa: B023
        EconomizeArm(name, model, tokenizer, ()).answer([[5]], 80)
        handle.remove()
        forwards[name] = len(count)
    assert 0 < forwards["economize-lookup"] < forwards["economize"]


@needs_economize
def test_economize_leaves_the_shared_model_as_it_was(model, tokenizer):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([PROMPTS[1]])
    with torch.inference_mode():
        logits = model(ids).logits
        EconomizeArm("economize-lookup", model, tokenizer, ()).answer([PROMPTS[1]], 4)
        assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
