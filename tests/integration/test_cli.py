"""Commands from their words to their output, on a tiny model in a folder."""

from __future__ import annotations

import io
import json
import sys

import pytest

from paceline import cli
from paceline.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base_model_folder(tmp_path_factory):
    """A tiny model without a chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(capsys, model_folder, monkeypatch):
    """Run a command in this process; returns exit code, standard output and standard error."""

    def run(command, *words, target=model_folder):
        options = ["--target", str(target), "--dtype", "fp32"] if target else []
        monkeypatch.setattr(sys, "argv", ["paceline", command, *words, *options])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run


PLAIN = ("--drafter", "none", "--max-new-tokens", "12")


def test_generate_prints_the_text_and_tells_figures_on_standard_error(run):
    code, out, err = run("generate", "hello", *PLAIN)
    assert code == 0
    assert json.loads(run("generate", "hello", *PLAIN, "--json")[1])["text"] + "\n" == out
    assert "12 tokens in" in err


def test_json_is_one_object_with_everything_asked_for(run):
    code, out, err = run("generate", "hello", *PLAIN, "--json")
    assert (code, err) == (0, "")
    stored = json.loads(out)
    for name in (
        "token_ids",
        "text",
        "finish_reason",
        "num_rounds",
        "num_draft_tokens",
        "num_accepted_tokens",
        "mean_acceptance_length",
        "acceptance_rate",
        "seconds",
        "tokens_per_second",
    ):
        assert name in stored
    assert len(stored["token_ids"]) == stored["num_output_tokens"] == 12
    assert "log_probs" not in stored


def test_drafting_changes_the_rounds_and_not_the_text(run):
    plain = json.loads(run("generate", "abc abc abc abc", *PLAIN, "--json")[1])
    words = ("--drafter", "prompt_lookup", "--max-new-tokens", "12", "--num-speculative-tokens", "4")
    drafted = json.loads(run("generate", "abc abc abc abc", *words, "--json")[1])
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["num_draft_tokens"] > 0 == plain["num_draft_tokens"]


def test_the_prompt_goes_through_the_chat_template_unless_raw(run, tokenizer):
    chat = json.loads(run("generate", "hello", *PLAIN, "--json")[1])
    raw = json.loads(run("generate", "hello", *PLAIN, "--json", "--raw")[1])
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert (chat["prompt_len"], raw["prompt_len"]) == (len(ids), len(tokenizer("hello")["input_ids"]))


def test_streamed_text_is_the_text(run):
    whole = run("generate", "hello", *PLAIN)[1]
    assert run("generate", "hello", *PLAIN, "--stream")[1] == whole


def test_a_dash_reads_the_prompt_from_standard_input(run, monkeypatch):
    expected = run("generate", "hello\nyou", *PLAIN)[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nyou\n"))
    assert run("generate", "-", *PLAIN)[1] == expected


def test_sampling_options_reach_the_decoder(run):
    words = ("--temperature", "1", "--seed", "4", "--json")
    first = json.loads(run("generate", "hello", *PLAIN, *words)[1])
    again = json.loads(run("generate", "hello", *PLAIN, *words)[1])
    other = json.loads(run("generate", "hello", *PLAIN, "--temperature", "1", "--seed", "5", "--json")[1])
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    greedy = json.loads(run("generate", "hello", *PLAIN, "--json", "--logprobs", "2")[1])
    ended = json.loads(
        run("generate", "hello", *PLAIN, "--json", "--eos-token-id", str(greedy["token_ids"][4]))[1]
    )
    assert ended["finish_reason"] == "stop"
    assert ended["token_ids"] == greedy["token_ids"][: greedy["token_ids"].index(greedy["token_ids"][4]) + 1]
    assert len(greedy["log_probs"]) == 12
    assert len(greedy["log_probs"][0]["top"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--verifier", "greedy", "--temperature", "0.5"), "greedy"),
        (("--verifier", "sampling"), "sampling"),
        (("--verifier", "sampling", "--temperature", "0"), "sampling"),
        (("--drafter", "phrse"), "'phrase'"),
        (("--drafter", "none", "--head", "somewhere"), "head"),
        (("--top-p", "7"), "top_p"),
        (("--stream", "--json"), "--stream"),
        (("--device", "gpu"), "device"),
    ],
)
def test_what_cannot_work_is_one_line_on_standard_error_and_exit_2(run, words, told):
    drafter = () if "--drafter" in words else ("--drafter", "none")
    code, out, err = run("generate", "hello", *drafter, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert told in err
    assert err.count("\n") == 1


def test_a_target_that_does_not_exist_is_named(run, tmp_path):
    code, _, err = run("generate", "hello", *PLAIN, target=tmp_path / "absent")
    assert code == 2
    assert "absent" in err


def test_an_empty_raw_prompt_is_refused(run):
    code, _, err = run("generate", "", *PLAIN, "--raw")
    assert code == 2
    assert "0 tokens" in err


def test_a_base_model_takes_the_prompt_raw_with_a_notice(run, base_model_folder):
    code, out, err = run("generate", "hello", *PLAIN, target=base_model_folder)
    assert code == 0
    assert "no chat template" in err
    assert run("generate", "hello", *PLAIN, "--raw")[1] == out
    assert "no chat template" not in run("generate", "hello", *PLAIN, "--raw", target=base_model_folder)[2]


def test_chat_remembers_until_it_is_left(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nwhy\n/stats\n/exit\nnever read\n"))
    code, out, err = run("chat", *PLAIN)
    assert code == 0
    assert out.count("> ") >= 4
    assert "tokens of the conversation were still cached" in err


def test_chat_ends_with_its_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run("chat", *PLAIN)[0] == 0


def test_chat_needs_a_chat_template(run, base_model_folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    code, _, err = run("chat", *PLAIN, target=base_model_folder)
    assert code == 2
    assert "chat template" in err


def test_demo_shows_both_answers_and_a_table(run):
    words = ("--drafter", "prompt_lookup", "--max-new-tokens", "10", "--prompt", "abc abc", "--prompt", "why")
    code, out, _ = run("demo", *words)
    assert code == 0
    assert out.count("tokens/s") == 4
    assert "2 of 2" in out


@pytest.fixture
def suites(tmp_path):
    """A folder with one short suite: the tiny model has little room."""
    prompts = [{"turns": ["hello"]}, {"turns": ["why", "and then"]}, {"turns": ["abc abc"]}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return tmp_path


def test_bench_writes_results_and_prints_a_table(run, suites, tmp_path):
    out_folder = tmp_path / "results"
    words = ("--suite", "own", "--data", str(suites), "--limit", "2", "--max-new-tokens", "6")
    words += ("--drafters", "none,prompt_lookup", "--num-speculative-tokens", "2,4", "--out", str(out_folder))
    code, out, _ = run("bench", *words)
    assert code == 0
    assert "prompt_lookup" in out
    stored = json.loads((out_folder / "results.json").read_text())
    assert [(row["drafter"], row["num_speculative_tokens"]) for row in stored["rows"]] == [
        ("hf_generate", None),
        ("none", None),
        ("prompt_lookup", 2),
        ("prompt_lookup", 4),
    ]
    assert stored["prompt_ids"] == {"own": ["1", "2"]}
    assert stored["command"].startswith("paceline bench --suite own")
    assert {path.suffix for path in out_folder.iterdir()} == {".json", ".jsonl", ".md", ".png"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--suite", "gsm8k"), "--data"),
        (("--num-speculative-tokens", "many"), "num_speculative_tokens is 'many'"),
        (("--drafters", "nonne"), "'none'"),
        (("--baseline", "vllm"), "hf_generate"),
        (("--limit", "0"), "limit"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(run, tmp_path, words, told):
    drafters = () if "--drafters" in words else ("--drafters", "none")
    code, _, err = run("bench", "--out", str(tmp_path / "results"), *drafters, *words)
    assert code == 2
    assert told in err


def test_calibrate_prints_limits_and_writes_what_it_found(run, tmp_path):
    data = tmp_path / "own.jsonl"
    data.write_text('{"prompt": "one two one two one two"}\n{"prompt": "a b a b a b"}\n')
    words = ["--drafter", "prompt_lookup", "--data", str(data), "--out", str(tmp_path / "out")]
    words += ["--max-new-tokens", "24", "--num-speculative-tokens", "4", "--regret-prices", "1,4"]
    code, out, err = run("calibrate", *words)
    assert code == 0
    assert "percentile 25: --max-regret-per-value" in out
    assert "loss 0.02 a token" in out
    assert "calibration.json" in err
    stored = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert stored["num_answers"] == 2
    assert stored["settings"]["drafter"] == "prompt_lookup"
    assert [trial["limits"]["regret_price"] for trial in stored["trials"]] == [1, 4]


def test_calibrate_reads_the_file_it_is_given_and_refuses_wishes_first(run, tmp_path):
    """A file of the name of a built-in suite is the user's all the same."""
    data = tmp_path / "builtin.jsonl"
    data.write_text('{"prompt": "one two one two one two"}\n')
    words = ["--drafter", "prompt_lookup", "--data", str(data), "--out", str(tmp_path / "out")]
    words += ["--max-new-tokens", "16", "--num-speculative-tokens", "4", "--value-horizon", "3"]
    code, out, _ = run("calibrate", *words, "--regret-prices", "")
    assert code == 0
    assert "--value-horizon 3" in out
    stored = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert (stored["num_answers"], stored["trials"]) == (1, [])
    code, _, err = run("calibrate", *words, "--loss-per-token", "0")
    assert code != 0
    assert "--loss-per-token 0" in err
    code, _, err = run("calibrate", *words, "--regret-prices", "1,x")
    assert code != 0
    assert "--regret-prices is '1,x'" in err


@pytest.fixture
def single_turns(tmp_path):
    """A suite whose prompts and answers fit the tiny model's context."""
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("hello", "why", "abc"))
    )
    return tmp_path


def test_check_passes_where_answers_are_identical(run, single_turns):
    words = ("--suite", "own", "--data", str(single_turns), "--max-new-tokens", "50", "--drafters", "none")
    code, out, _ = run("check", *words)
    assert code == 0
    assert "threshold:" in out
    assert "3 answers, 0 differ" in out


def test_check_fails_on_a_difference_that_is_no_near_tie(run, single_turns, monkeypatch):
    from paceline.bench import near_ties

    monkeypatch.setattr(near_ties, "first_difference", lambda own, other: 0)
    monkeypatch.setattr(near_ties, "logit_gaps", lambda *_: (0.5, 0.5))
    words = ("--suite", "own", "--data", str(single_turns), "--max-new-tokens", "50", "--drafters", "none")
    code, out, _ = run("check", *words)
    assert code == 1
    assert "NOT A NEAR-TIE" in out


def test_doctor_and_heads_run(run):
    assert run("doctor", target=None)[0] == 0
    assert run("heads", target=None)[0] == 0


def test_an_interrupt_ends_generate_with_130_and_no_traceback(run, monkeypatch):
    from paceline.engine.speculate import SpeculativeEngine

    plain, rounds = SpeculativeEngine.round, []

    def interrupted(self):
        rounds.append(1)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return plain(self)

    monkeypatch.setattr(SpeculativeEngine, "round", interrupted)
    code, out, err = run("generate", "hello", *PLAIN, "--stream")
    assert code == 130
    assert out
    assert "Traceback" not in err


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(run, prompt):
    """A chat template would turn it into a question that nobody asked."""
    code, _, err = run("generate", prompt)
    assert code == 2
    assert "the prompt is empty" in err
