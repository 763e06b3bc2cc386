"""The same `model.generate` call, plain and with paceline: the same text, sooner.

Usage: python examples/transformers_generate.py MODEL [PROMPT]

MODEL is a Hugging Face Hub id or a local folder. Prompt lookup needs no trained head; with one for the model,
make the Generator with drafter="phrase".
"""

from __future__ import annotations

import sys
from time import perf_counter

from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline

PROMPT = "one two three four, one two three four, one two three four, one two"


def main(arguments: list[str]) -> None:
    """Generate twice and compare."""
    name, prompt = arguments[0], " ".join(arguments[1:]) or PROMPT
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    inputs = {"input_ids": tokenizer(prompt, return_tensors="pt")["input_ids"]}
    options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}

    # Made once for a model; every later call shares it.
    generator = paceline.load(model=model, tokenizer=tokenizer, drafter="prompt_lookup")

    start = perf_counter()
    plain = model.generate(**inputs, **options)
    middle = perf_counter()
    fast = model.generate(**inputs, **options, custom_generate=paceline.custom_generate, paceline=generator)
    end = perf_counter()

    print(tokenizer.decode(fast[0], skip_special_tokens=True))
    print(f"same ids: {fast.tolist() == plain.tolist()}")
    print(f"seconds: plain {middle - start:.2f}, with paceline {end - middle:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
