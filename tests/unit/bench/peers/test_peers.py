"""Rivals among the other arms: names, refusals, and what a report says of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench_fakes import FakeArm
from paceline.bench import benchmark
from paceline.bench.benchmark import BenchmarkOptions, run_benchmark
from paceline.bench.check import run_check
from paceline.bench.peers import economize, llama_cpp
from paceline.bench.peers.llama_cpp import build_llama_cpp
from paceline.bench.peers.registry import PEERS, peer_arms
from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.errors import ConfigError, MissingDependencyError, UnsupportedFeatureError
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import tiny_model

DESCRIPTION = {"software": "Rival 1.0", "weights": "q8_0", "threads": 2}


@pytest.fixture
def generator(target_of, tokenizer):
    """Room for prompts and answers; half of the noise check's prompts are longer than 64 tokens."""
    return Generator(target_of("llama", max_position_embeddings=1024), tokenizer, NoDrafter())


@pytest.fixture
def options(tmp_path):
    """Two prompts of our own."""
    texts = ["tell me about the cat and then about the hat on the mat " * 2, "and why is that so?"]
    lines = [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / "own.jsonl").write_text("\n".join(lines) + "\n")
    return BenchmarkOptions(
        suites=("own",), data_folder=tmp_path, max_new_tokens=40, drafters=("none",), peers=("llama.cpp",)
    )


@pytest.fixture
def rival(monkeypatch):
    """An arm that always answers 7, 8, 9 takes the place of llama.cpp."""
    arm = FakeArm("llama.cpp")
    arm.description = DESCRIPTION
    monkeypatch.setattr(benchmark, "peer_arms", lambda generator, names, progress: [arm] if names else [])
    return arm


def test_a_rival_is_a_row_a_setting_and_a_line_of_the_report(generator, options, rival, tmp_path):
    report = run_benchmark(options, generator, target="tiny", out=tmp_path / "out")
    assert [row.drafter for row in report.rows] == ["hf_generate", "llama.cpp", "none"]
    row = report.rows[1]
    assert (row.num_output_tokens, row.identical_fraction, row.mean_acceptance_length) == (6, 0.0, None)
    assert row.tokens_per_second is not None
    assert row.speedup_vs_hf_generate is not None
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"]["peers"] == {"llama.cpp/greedy": DESCRIPTION}
    assert results["rows"][1]["drafter"] == "llama.cpp"
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "| own | llama.cpp | Rival 1.0 | q8_0 | 2 | 0 of 2 |" in markdown
    assert len(rival.asked) == 3  # one to warm up


def test_a_rivals_differences_are_not_judged(generator, options, rival, tmp_path):
    report = run_benchmark(options, generator, target="tiny", out=tmp_path / "out")
    assert report.differences == []
    assert "All answers but those of rivals are identical to their reference." in report.as_markdown()


def test_a_check_neither_fails_nor_counts_because_of_a_rival(generator, options, rival):
    outcome = run_check(options, generator, target="tiny")
    assert rival.asked
    assert (outcome.num_answers, outcome.differences) == (2, ())


def test_a_run_without_rivals_says_nothing_of_them(generator, options, tmp_path):
    plain = BenchmarkOptions(
        suites=options.suites, data_folder=options.data_folder, max_new_tokens=4, drafters=("none",)
    )
    report = run_benchmark(plain, generator, target="tiny", out=tmp_path / "out")
    assert "peers" not in report.metadata["settings"]
    assert "ival" not in report.as_markdown()


def test_another_version_of_a_rival_does_not_go_on_with_an_earlier_run(generator, options, rival, tmp_path):
    run_benchmark(options, generator, target="tiny", out=tmp_path / "out")
    rival.description = {**DESCRIPTION, "software": "Rival 2.0"}
    with pytest.raises(ConfigError, match="peers was"):
        run_benchmark(options, generator, target="tiny", out=tmp_path / "out")


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp-q8_0"])
def test_llama_cpp_refuses_batches_before_anything_is_loaded(name):
    with pytest.raises(UnsupportedFeatureError, match="largest batch is 4"):
        BenchmarkOptions(peers=(name,), batch_sizes=(1, 4))
    assert BenchmarkOptions(peers=("economize",), batch_sizes=(1, 4)).peers == ("economize",)


def test_unknown_and_repeated_rivals_are_refused():
    with pytest.raises(ConfigError, match=r"did you mean 'llama\.cpp'"):
        BenchmarkOptions(peers=("llama.cp",))
    with pytest.raises(UnsupportedFeatureError, match="asked for twice"):
        BenchmarkOptions(peers=("economize", "economize"))


def test_rivals_alone_are_something_to_measure():
    assert BenchmarkOptions(drafters=(), baselines=(), peers=("economize",)).peers
    with pytest.raises(ConfigError, match="nothing to measure"):
        BenchmarkOptions(drafters=(), baselines=())


@pytest.mark.parametrize("name", PEERS)
def test_dropped_weights_cannot_be_handed_to_a_rival(name, tokenizer):
    model = tiny_model("llama")
    generator = Generator(HuggingFaceTarget(model), tokenizer, NoDrafter())
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.new_empty(0)
    with pytest.raises(ConfigError, match="keep_model=True"):
        peer_arms(generator, [name])


def test_a_target_without_a_model_cannot_be_handed_to_a_rival():
    with pytest.raises(UnsupportedFeatureError, match="wraps no Hugging Face model"):
        peer_arms(SimpleNamespace(target=SimpleNamespace()), ["economize"])


def test_llama_cpp_on_the_cpu_is_not_compared_with_a_target_on_a_gpu():
    with pytest.raises(UnsupportedFeatureError, match="--device cpu"):
        build_llama_cpp("llama.cpp", SimpleNamespace(target=SimpleNamespace(device=torch.device("cuda"))))


def test_targets_without_a_fingerprint_do_not_share_a_file(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(llama_cpp, "find_node", lambda: "node")
    monkeypatch.setattr(llama_cpp, "check_package", lambda folder: None)
    monkeypatch.setattr(llama_cpp, "LlamaCppArm", lambda name, command, *_, **settings: (command, settings))
    found = []
    for seed in (1, 2, 1):
        target = HuggingFaceTarget(tiny_model("llama", seed=seed))
        assert target.fingerprint == ""
        found.append(build_llama_cpp("llama.cpp", Generator(target, tokenizer, NoDrafter())))
    (command, settings), other, again = found
    assert command == again[0] != other[0]
    assert command[:3] == ["node", str(llama_cpp.SCRIPT), str(tmp_path / "peers")]
    assert Path(command[3]).parent == tmp_path / "peers" / "gguf"
    assert command[4:] == [str(torch.get_num_threads()), "256"]
    assert (settings["context_len"], settings["weights"]) == (256, "bf16")


@pytest.mark.parametrize("found", [None, "0.2.0"])
def test_without_economize_the_line_has_the_exact_command(found, monkeypatch, generator):
    def version(name):
        if found is None:
            raise economize.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(economize, "version", version)
    with pytest.raises(MissingDependencyError, match=r"`pip install economize==0\.3\.2`") as caught:
        peer_arms(generator, ["economize"])
    assert (found or "none") in str(caught.value)


def test_without_node_the_arm_says_what_to_install(monkeypatch, generator, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="npm install"):
        peer_arms(generator, ["llama.cpp"])
