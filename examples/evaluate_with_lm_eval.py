"""Evaluate a model with lm-evaluation-harness and paceline, on small tasks from local files.

    pip install paceline lm-eval
    python examples/evaluate_with_lm_eval.py MODEL [--compare]

MODEL is an alias (smollm2), a folder or a Hub id. The harness downloads the data of its own tasks; the three
tasks here are written to a folder first, so that this runs offline: a multiple choice, free answers, and the
perplexity of a text. `--compare` does the same with the harness's own `hf` model, which needs a folder or a
Hub id, and compares every answer and every log-likelihood. The same by command line:

    python -m paceline.integrations.lm_eval --model paceline --model_args target=MODEL,drafter=prompt_lookup \
        --include_path TASKS --tasks paceline_choice,paceline_answer,paceline_text
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from paceline.integrations.lm_eval import PacelineLM

TASKS = ("paceline_choice", "paceline_answer", "paceline_text")
CHOICES = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Rome", "Oslo"], "answer": 0},
    {"question": "How many legs has a spider?", "choices": ["six", "eight", "ten"], "answer": 1},
    {"question": "What do bees make?", "choices": ["milk", "silk", "honey"], "answer": 2},
]
ANSWERS = [
    {
        "question": "Repeat: red, green, blue, red, green, blue.",
        "answer": "red, green, blue, red, green, blue.",
    },
    {"question": "What is two and three?", "answer": "five"},
    {"question": "Say the word tin.", "answer": "tin"},
]
PAGES = [{"text": "The cat sat on the mat, and the hat sat on the cat."}, {"text": "One, two, three."}]
QUESTION = "Question: {{question}}\nAnswer:"
# Keys of a task as docs/new_task_guide.md of the harness explains them.
SETTINGS: dict[str, dict[str, Any]] = {
    "paceline_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": QUESTION,
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "paceline_answer": {
        "output_type": "generate_until",
        "doc_to_text": QUESTION,
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 48, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "paceline_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


def write_tasks(folder: Path) -> Path:
    """Write three tasks and their data; the folder is what `--include_path` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(TASKS, (CHOICES, ANSWERS, PAGES), strict=True):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        task = {
            "task": name,
            # The harness hands these to `datasets.load_dataset`: "json" reads local files.
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
            "test_split": "test",
            **SETTINGS[name],
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=2), "utf-8")
    return folder


def evaluate(model: Any, tasks: Path) -> dict[str, Any]:
    """Results of the harness, samples included."""
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=list(TASKS),
        # Without the harness's own thousands of tasks, which take long to list.
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return found


def answers_of(found: dict[str, Any], name: str) -> list[Any]:
    """What the model said to every request of a task, in order."""
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answer in sample["resps"]]


def numbers_of(answers: Any) -> list[float]:
    """All log-likelihoods in nested answers."""
    if isinstance(answers, list | tuple):
        return [number for answer in answers for number in numbers_of(answer)]
    return [float(answers)]


def main(arguments: list[str]) -> None:
    """Evaluate, and compare on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--drafter", default="prompt_lookup")
    parser.add_argument("--num-speculative-tokens", default="16")
    parser.add_argument("--compare", action="store_true", help="with the harness's own hf model, in fp32")
    options = parser.parse_args(arguments)
    model = PacelineLM(
        options.model,
        drafter=options.drafter,
        num_speculative_tokens=options.num_speculative_tokens,
        dtype="fp32" if options.compare else "auto",
        execution="eager" if options.compare else "auto",
        batch_size=4,
    )
    with tempfile.TemporaryDirectory() as folder:
        tasks = write_tasks(Path(folder))
        found = evaluate(model, tasks)
        for name in TASKS:
            figures = {key: value for key, value in found["results"][name].items() if key.endswith(",none")}
            print(name, figures)
        print(f"speed: {model.speed}")
        if not options.compare:
            return
        from lm_eval.models.huggingface import HFLM

        reference = evaluate(
            HFLM(pretrained=options.model, dtype="float32", batch_size=4, device="cpu"), tasks
        )
    ours, theirs = (answers_of(results, "paceline_answer") for results in (found, reference))
    print(f"same answers: {ours == theirs}")
    gap = max(
        abs(own - other)
        for name in ("paceline_choice", "paceline_text")
        for own, other in zip(
            numbers_of(answers_of(found, name)), numbers_of(answers_of(reference, name)), strict=True
        )
    )
    print(f"same log-likelihoods: {gap < 1e-3} (largest difference {gap:.1e})")


if __name__ == "__main__":
    main(sys.argv[1:])
