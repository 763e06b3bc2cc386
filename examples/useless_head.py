"""Write a copy of a head with its phrases mixed up: as sure of itself as before, and nearly always wrong.

    python examples/useless_head.py out/useless
    paceline bench --drafters none,phrase:out/useless --baseline "" --out out/useless-bench

The point is what the node budget does with it: it stops asking, and plain decoding is all that is left.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from paceline.heads.checkpoint import default_head, load_head, save_head

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", type=Path, help="Folder of the new head.")
parser.add_argument("--head", type=Path, default=default_head("smollm2"), help="Head to copy.")
arguments = parser.parse_args()

loaded = load_head(arguments.head)
order = torch.randperm(len(loaded.vocabulary), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    loaded.head.output.weight.copy_(loaded.head.output.weight[order])
    loaded.head.output.bias.copy_(loaded.head.output.bias[order])
provenance = {**loaded.provenance, "note": "output rows shuffled on purpose"}
save_head(
    arguments.out, loaded.head, loaded.vocabulary, provenance, "# A useless head\n", dtype=torch.bfloat16
)
print(f"{arguments.out}: {len(order):,} phrases mixed up")
