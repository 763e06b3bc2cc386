"""The compiled execution path: the same text as the model's own forward, for every family that it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache

import pytest
import torch

from conftest import PROMPTS
from paceline.drafters.none import NoDrafter
from paceline.engine.forward_cost import ForwardCost
from paceline.engine.generator import Generator
from paceline.engine.load import load
from paceline.engine.node_budget import AdaptiveBudget
from paceline.engine.prefill import FixedPace, TimedPace
from paceline.errors import ConfigError, UnsupportedFeatureError
from paceline.kernels import build
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.targets import huggingface
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_ARCHITECTURES, ReplayDrafter, greedy_oracle, tiny_model
from paceline.tree import DraftTree

NUM_NEW = 24
GREEDY = SamplingParameters(max_new_tokens=NUM_NEW)
# Not run by the fast path: scaled residuals, and rotary positions of another kind.
FOREIGN = {"granite", "cohere"}
FAMILIES = sorted(set(TINY_ARCHITECTURES) - FOREIGN - {"gpt2-short", "llama-wide-heads"})


def settings_of(architecture: str) -> dict[str, int]:
    """The kernels want sizes that are multiples of 16; heads of 32 go through tiles where there are any."""
    wide = {"n_embd": 128} if architecture == "gpt2" else {"hidden_size": 128}
    has_head_dim = "head_dim" in TINY_ARCHITECTURES[architecture][2]
    return wide | ({"head_dim": 32} if has_head_dim else {})


@cache
def model_of(architecture: str, dtype: torch.dtype = torch.float32):
    return tiny_model(architecture, dtype=dtype, **settings_of(architecture))


@cache
def fast_target_of(architecture: str, dtype: torch.dtype = torch.float32) -> HuggingFaceTarget:
    return HuggingFaceTarget(model_of(architecture, dtype), execution="fast")


@cache
def expected_of(architecture: str) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): greedy_oracle(model_of(architecture), p, NUM_NEW) for p in PROMPTS}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_ids_are_those_of_the_oracle(architecture, tokenizer):
    """Plain, with trees that have wrong branches, alone and in a ragged batch."""
    target, expected = fast_target_of(architecture), expected_of(architecture)
    assert target.execution == "fast"
    drafters = [NoDrafter(), ReplayDrafter(expected, 4), ReplayDrafter(expected, 4, wrong=2, decoys=True)]
    for drafter in drafters:
        generator = Generator(target, tokenizer, drafter, num_speculative_tokens=64)
        alone = [generator.generate(p, GREEDY) for p in PROMPTS]
        together = generator.generate_batch(PROMPTS, GREEDY)
        for results in (alone, together):
            assert [list(r.token_ids) for r in results] == [expected[tuple(p)] for p in PROMPTS]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_and_features_are_those_of_the_model(architecture):
    """Up to rounding, for every node of a tree and every layer's input."""
    fast, eager = fast_target_of(architecture), HuggingFaceTarget(model_of(architecture))
    tree = DraftTree.from_paths(9, [[20, 21, 22], [20, 30], [40, 41]])
    found = []
    for target in (fast, eager):
        sequence = Sequence(PROMPTS[2], GREEDY, frozenset(), 256, seed=0)
        output = target.forward([Segment(sequence, tuple(PROMPTS[2]), tree)], (0, 1))
        found.append((output.hidden, output.tree_logits(), output.features[0], output.features[1]))
        target.release(sequence)
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-3 * float(reference.abs().max()))


@pytest.mark.parametrize("prompt_len", [5, 29, 60], ids=lambda n: f"{n} before")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "gpt2", "mistral-sliding", "qwen3"])
def test_a_token_has_the_same_bits_in_every_tree_and_batch(architecture, dtype, prompt_len, tokenizer):
    """The path of a tree with decoys, in a batch, against the same tokens one by one: equal, not close.

    Attention goes in blocks of 32 positions: the longer prompts let the path cross from one to the next.
    """
    target = fast_target_of(architecture, dtype)
    prompt, text = [(5 * i) % 70 + 9 for i in range(prompt_len)], [(7 * i) % 90 + 3 for i in range(12)]
    plain = plain_logits(target, prompt, text)
    others = [Sequence(p, GREEDY, frozenset(), 256, seed=0) for p in PROMPTS[:2]]
    sequence = Sequence(prompt, GREEDY, frozenset(), 256, seed=0)
    decoys = [[80 + i, 81] for i in range(5)]
    tree = DraftTree.from_paths(prompt[-1], [*decoys, text[:-1], [text[0], 90], [text[0], text[1], 91, 92]])
    segments = [Segment(o, tuple(o.prompt_ids[:-1]), DraftTree.root_only(o.prompt_ids[-1])) for o in others]
    segments.insert(1, Segment(sequence, tuple(prompt[:-1]), tree))
    logits = target.forward(segments).tree_logits()
    for own in (*others, sequence):
        target.release(own)
    node, path = 0, [0]
    for token in text[:-1]:
        node = int(((tree.parents == node) & (tree.token_ids == token)).nonzero()[0, 0])
        path.append(node)
    assert torch.equal(logits[[1 + node for node in path]], plain)


# Heads of a tile's width and of two, a tile half full of queries and overfull, a window that a path outgrows.
TILE_SHAPES = {
    "group of 3": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},
    "group of 10": {"hidden_size": 320, "num_attention_heads": 10, "num_key_value_heads": 1},
    "group of 17": {"hidden_size": 544, "num_attention_heads": 17, "num_key_value_heads": 1},
    "heads of 64": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    "window of 8": {"hidden_size": 128, "sliding_window": 8},
}


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("shape", TILE_SHAPES)
def test_a_deep_and_wide_tree_has_the_bits_of_plain_decoding(shape, num_threads, monkeypatch):
    """A path of 40 tokens among decoys, over several blocks of rows, in bf16: equal to one at a time."""
    # Random weights of these sizes round by more than the check at load allows a real model.
    monkeypatch.setattr(huggingface, "check_target", lambda *_: None)
    name = "mistral-sliding" if "window" in shape else "llama"
    model = tiny_model(name, dtype=torch.bfloat16, **TILE_SHAPES[shape])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        target = HuggingFaceTarget(model, execution="fast")
    finally:
        torch.set_num_threads(before)
    prompt, text = [(5 * i) % 70 + 9 for i in range(60)], [(7 * i) % 90 + 3 for i in range(40)]
    plain = plain_logits(target, prompt, text)
    sequence = Sequence(prompt, GREEDY, frozenset(), 256, seed=0)
    target.forward([Segment(sequence, tuple(prompt[:-1]), None)])
    decoys = [[*text[:depth], 95, 94] for depth in range(0, 36, 3)]
    tree = DraftTree.from_paths(prompt[-1], [*decoys[:6], text[:-1], *decoys[6:]])
    logits = target.forward([Segment(sequence, (), tree)]).tree_logits()
    node, path = 0, [0]
    for token in text[:-1]:
        [node] = ((tree.parents == node) & (tree.token_ids == token)).nonzero()[:, 0].tolist()
        path.append(node)
    assert torch.equal(logits[path], plain)
    with torch.no_grad():
        eager = model(torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) - 1 :]
    assert float((logits[path] - eager).norm() / eager.norm()) < 0.2


def plain_logits(target, prompt, text):
    """[T, V]: logits in front of every token of `text`, one token a forward."""
    logits = []
    sequence = Sequence(prompt, GREEDY, frozenset(), 256, seed=0)
    prefix, root = tuple(prompt[:-1]), prompt[-1]
    for token in text:
        output = target.forward([Segment(sequence, prefix, DraftTree.root_only(root))])
        logits.append(output.tree_logits()[0])
        commit_one(target, sequence, token)
        prefix, root = (), token
    target.release(sequence)
    return torch.stack(logits)


def commit_one(target, sequence, token):
    """Keep one token, as a round of plain decoding does."""
    from paceline.sequence import VerifyResult

    result = VerifyResult((), (), token)
    sequence.output_ids.extend(result.emitted_ids)
    target.commit(sequence, result)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_half_precision_text_does_not_depend_on_the_drafter(architecture, tokenizer):
    """In bf16 as well: not near-ties, the same ids."""
    target = fast_target_of(architecture, torch.bfloat16)
    plain = Generator(target, tokenizer, NoDrafter())
    expected = {tuple(p): list(plain.generate(p, GREEDY).token_ids) for p in PROMPTS}
    drafter = ReplayDrafter(expected, 4, wrong=2, decoys=True)
    drafted = Generator(target, tokenizer, drafter, num_speculative_tokens=64)
    results = drafted.generate_batch(PROMPTS, GREEDY)
    assert [list(r.token_ids) for r in results] == list(expected.values())


def test_several_threads_compute_what_one_computes(tokenizer):
    """Work is dealt out by columns and rows, never by terms of a sum."""
    expected = expected_of("llama")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        target = HuggingFaceTarget(model_of("llama"), execution="fast")
    finally:
        torch.set_num_threads(before)
    generator = Generator(target, tokenizer, ReplayDrafter(expected, 4, decoys=True))
    results = generator.generate_batch(PROMPTS, GREEDY)
    assert [list(r.token_ids) for r in results] == list(expected.values())


@pytest.mark.parametrize("architecture", sorted(FOREIGN))
def test_other_models_stay_eager_and_say_why(architecture):
    target = HuggingFaceTarget(tiny_model(architecture), execution="auto")
    assert target.execution == "eager"
    assert f"does not know '{architecture}' models" in target.eager_reason
    with pytest.raises(UnsupportedFeatureError, match=f"does not know '{architecture}' models"):
        HuggingFaceTarget(tiny_model(architecture), execution="fast")


def test_sizes_and_dtypes_that_the_kernels_do_not_take_are_named():
    with pytest.raises(UnsupportedFeatureError, match="head size that is a multiple of 16, not 8"):
        HuggingFaceTarget(tiny_model("llama"), execution="fast")
    half = tiny_model("llama", dtype=torch.float16, hidden_size=128)
    with pytest.raises(UnsupportedFeatureError, match="runs fp32 and bf16 on the CPU"):
        HuggingFaceTarget(half, execution="fast")


def test_a_plan_that_disagrees_with_the_model_is_not_used(monkeypatch):
    """The probe compares logits: a wrong scale is found, and the model's own forward serves."""
    from dataclasses import replace

    from paceline.targets import fast

    def wrong_plan(model, architecture, read=fast.read_plan):
        return replace(read(model, architecture), scale=1.0)

    monkeypatch.setattr(fast, "read_plan", wrong_plan)
    target = HuggingFaceTarget(model_of("llama"), execution="auto")
    assert target.execution == "eager"
    assert "is rounding" in target.eager_reason


def test_without_a_compiler_auto_is_eager(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: None)
    build._LOADED.clear()
    try:
        assert HuggingFaceTarget(model_of("llama"), execution="auto").execution == "eager"
        with pytest.raises(UnsupportedFeatureError, match="no C\\+\\+ compiler"):
            HuggingFaceTarget(model_of("llama"), execution="fast")
    finally:
        build._LOADED.clear()


def test_a_failed_build_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    build._LOADED.clear()
    try:
        with pytest.raises(UnsupportedFeatureError, match="cannot compile the kernels"):
            build.load_kernels()
        assert not list((tmp_path / "kernels").iterdir())
    finally:
        build._LOADED.clear()


def test_dropped_weights_cannot_be_used_by_accident(tokenizer):
    """What is packed is dropped from the model on request; calling the model then says so."""
    model = tiny_model("llama", hidden_size=128)
    expected = greedy_oracle(model, PROMPTS[1], NUM_NEW)
    target = HuggingFaceTarget(model, execution="fast", releases_model=True)
    assert sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1) == 0
    generator = Generator(target, tokenizer, NoDrafter())
    assert list(generator.generate(PROMPTS[1], GREEDY).token_ids) == expected
    with pytest.raises(ConfigError, match="keep_model=True"):
        model(input_ids=torch.tensor([PROMPTS[1]]))


def test_a_model_in_memory_is_packed_only_when_asked(tokenizer):
    """It is shared, not copied, unless the caller wants speed more than memory."""
    model = tiny_model("llama", hidden_size=128)
    assert load(model=model, tokenizer=tokenizer, drafter="none").target.execution == "eager"
    asked = load(model=model, tokenizer=tokenizer, drafter="none", execution="fast")
    assert asked.target.execution == "fast"
    assert list(asked.generate(PROMPTS[1], GREEDY).token_ids) == greedy_oracle(model, PROMPTS[1], NUM_NEW)
    with pytest.raises(ConfigError, match="unknown execution 'quick'"):
        load(model=model, tokenizer=tokenizer, drafter="none", execution="quick")


def test_a_cache_folder_that_cannot_be_written_leaves_auto_eager(monkeypatch, tmp_path):
    """A local model needs no cache; it must not need one for its speed either."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(blocked))
    build._LOADED.clear()
    target = HuggingFaceTarget(model_of("llama"), execution="auto")
    assert target.execution == "eager"
    assert "PACELINE_CACHE_DIR" in target.eager_reason


def test_odd_sizes_are_padded_right(tokenizer):
    """Hidden and MLP sizes that are no multiples of 32, and an odd vocabulary."""
    settings = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 101}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("llama", dtype=dtype, intermediate_size=50, **settings)
        target = HuggingFaceTarget(model, execution="fast")
        results = Generator(target, tokenizer, NoDrafter()).generate_batch(PROMPTS, GREEDY)
        if dtype == torch.float32:
            expected = [greedy_oracle(model, p, NUM_NEW) for p in PROMPTS]
            assert [list(r.token_ids) for r in results] == expected


FORKED = """
import os, sys, torch
torch.set_num_threads(3)
from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.sampling import SamplingParameters
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import tiny_model, tiny_tokenizer

target = HuggingFaceTarget(tiny_model("llama", hidden_size=128), execution="fast")
generator = Generator(target, tiny_tokenizer(), NoDrafter())
ask = lambda: generator.generate([5, 6, 7], SamplingParameters(max_new_tokens=8)).token_ids
expected = ask()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # torch's own pool does not survive a fork either.
    os._exit(0 if ask() == expected else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_gets_threads_of_its_own():
    """The threads of a pool are not there after a fork: waiting for them would take for ever."""
    run = subprocess.run([sys.executable, "-c", FORKED], check=False, timeout=120)
    assert run.returncode == 0


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("execution", ["fast", "eager"])
def test_a_piece_shares_its_forward_with_those_that_decode_where_rows_are_not_padded(
    execution, drafts, tokenizer
):
    """Rows of prompts and of trees in one forward; what is padded takes a forward each."""
    target = HuggingFaceTarget(model_of("llama"), execution=execution)
    forward, seen = target.forward, []
    prompts = [PROMPTS[0], PROMPTS[2] * 3]
    expected = {tuple(p): greedy_oracle(target.model, list(p), NUM_NEW) for p in prompts}
    drafter = ReplayDrafter(expected, 4, wrong=2, decoys=True) if drafts else NoDrafter()
    budget = AdaptiveBudget(ForwardCost((1, 2, 128), (0.02, 0.02, 0.03)), pads=target.pads_rows)
    generator = Generator(target, tokenizer, drafter, num_speculative_tokens=budget)
    # No piece is quick enough: the shortest ones.
    generator.engine.pace = TimedPace(1e-9)
    target.forward = lambda segments, *rest: seen.append(segments) or forward(segments, *rest)
    first = generator.open(list(prompts[0]), GREEDY)
    while not first.sequence.output_ids:
        generator.engine.round()
    seen.clear()
    second = generator.open(list(prompts[1]), GREEDY)
    while generator.engine.has_work:
        generator.engine.round()
    assert [first.sequence.output_ids, second.sequence.output_ids] == list(expected.values())
    kinds = [{bool(segment.prefix_ids) for segment in segments} for segments in seen]
    assert ({True, False} in kinds) == (execution == "fast")
    assert sum({True} <= kind for kind in kinds) >= 2
    widths = [len(s.tree) for segments in seen for s in segments if s.tree is not None]
    assert (max(widths) > 1) == drafts


def test_a_piece_is_charged_for_its_own_rows_alone(tokenizer):
    """Else those that decode beside it would make pieces ever shorter."""

    class Watched(FixedPace):
        def observe(self, num_tokens, seconds):
            charged.append((num_tokens, seconds))

    target = HuggingFaceTarget(model_of("llama"), execution="fast")
    forward, charged = target.forward, []
    generator = Generator(target, tokenizer, NoDrafter())
    generator.engine.pace = Watched(1)
    first = generator.open([7], GREEDY)
    while not first.sequence.output_ids:
        generator.engine.round()
    target.forward = lambda *arguments: time.sleep(0.1) or forward(*arguments)
    charged.clear()
    generator.open([5, 6], GREEDY)
    started = time.perf_counter()
    generator.engine.round()
    total = time.perf_counter() - started
    # A row of the prompt, its root, and the row of the other.
    ((num_tokens, seconds),) = charged
    assert num_tokens == 1
    assert 0.03 < seconds < 0.5 * total
