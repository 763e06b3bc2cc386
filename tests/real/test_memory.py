"""Memory and start of the default target, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real_model

# Everything before `baseline` is bare imports: what a program that only loads the library would hold.
SCRIPT = """
import json, pathlib, resource, time
import psutil
import torch
import transformers
import transformers.models.llama.modeling_llama
import paceline
import paceline.engine.load
import paceline.targets.huggingface
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

torch.set_num_threads(2)
baseline = psutil.Process().memory_info().rss
started = time.perf_counter()
generator = paceline.load("smollm2", drafter="prompt_lookup", dtype="bf16", device="cpu")
ready = time.perf_counter() - started
prompt = [(i * i * 31 + i) % 40000 + 100 for i in range(1000)]
parameters = paceline.SamplingParameters(max_new_tokens=24, ignore_eos=True)
result = generator.generate(prompt, parameters)
weights = generator.target.num_weight_bytes
status = pathlib.Path("/proc/self/status")
if status.exists():
    # Linux: ru_maxrss would still hold the size of the process that started this one.
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    peak = int(line.split()[1]) * 1024
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({
    "num_tokens": result.prompt_len + len(result.token_ids),
    "weights": weights,
    "peak": peak - baseline,
    "ready_seconds": ready,
}))
"""


def test_one_long_sequence_stays_within_the_memory_promised(smollm2, record_property, capsys):
    """Peak resident size above bare imports: 1.5 times the weights plus 200 MB for 1,024 tokens in bf16."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert found.returncode == 0, found.stderr
    figures = json.loads(found.stdout.splitlines()[-1])
    for name, value in figures.items():
        record_property(name, value)
    weights, peak = figures["weights"] / 1e6, figures["peak"] / 1e6
    with capsys.disabled():
        print(
            f"\n  {weights:.0f} MB of weights, peak {peak:.0f} MB, ready in {figures['ready_seconds']:.1f} s"
        )
    assert figures["num_tokens"] == 1024
    assert figures["peak"] <= 1.5 * figures["weights"] + 200e6
    # The promise is 3 s on a quiet machine; a busy one must not fail the test.
    assert figures["ready_seconds"] < 30
