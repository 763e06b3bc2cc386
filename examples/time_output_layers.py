"""Time the output layer of a drafter: chosen rows against all rows, and the vocabularies against each other.

    python examples/time_output_layers.py
    python examples/time_output_layers.py --shapes 640x262144 --ks 2048 --rows 1,10

The first table compares `gather_dot` with what plain torch offers for the same product of chosen rows (a flat
or a row-by-row `index_select`, then `bmm`) and with the product of all rows; every call gets fresh random
rows, as drafting does, so that nothing is found in the cache. The second one times a drafting step's output
layer with each vocabulary. All arms take turns, and medians are given.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from statistics import median

from paceline.cli.threads import configure_threads

configure_threads()  # Before torch: its idle threads would spin on the cores that ours work on.

import torch
from rich.console import Console
from rich.table import Table

from paceline.drafters.compiled_phrase import CompiledPhrases
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.kernels.build import load_kernels
from paceline.kernels.gather_dot import gather_dot
from paceline.vocabularies.full import FullVocabulary
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import SpeculativeVocabulary, VocabularyRanking
from paceline.vocabularies.static import StaticVocabulary
from paceline.vocabularies.trie import TokenTrie

PUBLISHED = "1024x100352,4096x100352,2560x151936,4096x151936"
"""D x V of SpecVocab's benchmark (arXiv 2602.13836)."""
Arm = Callable[[], object]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shapes", default=f"640x262144,{PUBLISHED}", help="D x V, separated by commas.")
parser.add_argument("--ks", default="128,512,2048,8192", help="Chosen rows.")
parser.add_argument("--rows", default="1,10", help="States of a call: a chain, or a beam.")
parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
parser.add_argument("--device", default="cpu")
parser.add_argument("--repeats", type=int, default=30)
parser.add_argument("--static-entries", type=int, default=32_000)
arguments = parser.parse_args()
device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
console = Console(width=160)
if device.type == "cpu":
    load_kernels(print)


def timed(arms: dict[str, Arm]) -> dict[str, float]:
    """Median milliseconds of each arm, all of them in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(arguments.repeats + 3):
        for name, arm in arms.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            arm()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - started)
    return {name: median(found) * 1e3 for name, found in seconds.items()}


def by_flat_select(hidden: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """All rows in one `index_select`, then `bmm`."""
    rows = weight.index_select(0, index.flatten()).view(*index.shape, -1)
    return torch.bmm(rows, hidden[:, :, None])[:, :, 0]


def by_row_select(hidden: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """An `index_select` a state, then `bmm`."""
    rows = torch.stack([weight.index_select(0, own) for own in index])
    return torch.bmm(rows, hidden[:, :, None])[:, :, 0]


def kernel_times(hidden: torch.Tensor, weight: torch.Tensor, k: int) -> dict[str, float]:
    """Milliseconds of the products of `k` chosen rows, and of all."""
    # Drawn before: the draw is no part of what is timed.
    shape = (len(hidden), k)
    drawn = itertools.cycle(
        [torch.randint(len(weight), shape, device=device).sort(dim=1).values for _ in range(16)]
    )
    return timed(
        {
            "gather_dot": lambda: gather_dot(hidden, weight, next(drawn)),
            "shared rows": lambda: gather_dot(hidden, weight, next(drawn)[0]),
            "flat": lambda: by_flat_select(hidden, weight, next(drawn)),
            "row by row": lambda: by_row_select(hidden, weight, next(drawn)),
            "all rows": lambda: torch.nn.functional.linear(hidden, weight),
        }
    )


@torch.inference_mode()
def vocabulary_times(hidden: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Milliseconds of a drafting step's output layer, its ten best entries included."""
    layer = OutputLayer(weight)
    ranking = VocabularyRanking(weight.shape[1], len(weight)).to(device, dtype).requires_grad_(False)
    ids = torch.randperm(len(weight), device=device)[: arguments.static_entries].sort().values
    vocabularies = {
        "full": FullVocabulary(layer),
        "static": StaticVocabulary.of_rows(layer, ids),
        "speculative, own": SpeculativeVocabulary(layer, ranking),
        "speculative, shared": SpeculativeVocabulary(layer, ranking, shares_candidates=True),
    }
    return timed({name: lambda v=v: v.candidates(hidden).best(10) for name, v in vocabularies.items()})


def phrase_times(num_rows: int) -> dict[str, float]:
    """Milliseconds of a phrase draft of 24 nodes, by vocabulary."""
    chooser = random.Random(0)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < 80_000:
        found[tuple(chooser.randrange(49_152) for _ in range(chooser.randint(1, 4)))] = None
    inputs = torch.randn(num_rows, 2 * 576)
    arms: dict[str, Arm] = {}
    for name, size, ranking_width in (
        ("8,000", 8_000, 0),
        ("80,000", 80_000, 0),
        ("80,000, ranked", 80_000, 32),
    ):
        entries = list(found)[:size]
        config = PhraseHeadConfig(576, size, width=256, ranking_width=ranking_width)
        head = PhraseHead(config).eval().requires_grad_(False)
        head.output.to(torch.bfloat16)
        compiled = CompiledPhrases.where_possible(head, TokenTrie(entries), entries)
        assert compiled is not None
        arms[name] = lambda drafter=compiled: drafter.draft(inputs, [0] * num_rows, 24)
    return timed(arms)


kernels = Table(title="chosen rows")
steps = Table(title="output layer of a drafting step")
for (size, num_entries), num_rows in itertools.product(shapes, map(int, arguments.rows.split(","))):
    generator = torch.Generator(device).manual_seed(0)
    table = torch.randn(num_entries, size, generator=generator, device=device).to(dtype)
    states = torch.randn(num_rows, size, generator=generator, device=device).to(dtype)
    for chosen in map(int, arguments.ks.split(",")):
        found = kernel_times(states, table, chosen)
        if not kernels.columns:
            for name in ("D x V", "states", "k", *found, "best torch / ours", "all / ours"):
                kernels.add_column(name)
        kernels.add_row(
            f"{size} x {num_entries:,}",
            f"{num_rows}",
            f"{chosen:,}",
            *(f"{milliseconds:.3f}" for milliseconds in found.values()),
            f"{min(found['flat'], found['row by row']) / found['gather_dot']:.1f}",
            f"{found['all rows'] / found['gather_dot']:.1f}",
        )
    found = vocabulary_times(states, table)
    if not steps.columns:
        for name in ("D x V", "states", *found, "shared / full"):
            steps.add_column(name)
    steps.add_row(
        f"{size} x {num_entries:,}",
        f"{num_rows}",
        *(f"{milliseconds:.2f}" for milliseconds in found.values()),
        f"{found['speculative, shared'] / found['full']:.2f}",
    )
console.print(f"milliseconds, {arguments.dtype}, {device}, {torch.get_num_threads()} threads")
console.print(kernels)
console.print(steps)
if device.type == "cpu":
    phrases = Table(title="phrase draft of 24 nodes, 576 wide states")
    for num_rows in (1, 8):
        found = phrase_times(num_rows)
        if not phrases.columns:
            for name in ("sequences", *found):
                phrases.add_column(name)
        phrases.add_row(f"{num_rows}", *(f"{milliseconds:.2f}" for milliseconds in found.values()))
    console.print(phrases)
