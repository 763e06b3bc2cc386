"""Host values on their way to a device, without waiting for what the device computes.

A plain copy from ordinary memory to a CUDA device waits until the device has done everything asked of it so
far; a few such copies a round would put the host and the device in single file. From page-locked memory it
does not wait. That memory comes from torch's pool, which hands it out again only when the copy out of it is
over, so the caller may drop or change its own values right away.
"""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`; the host goes on at once, and the device keeps its order of work."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, values: Tensor) -> None:
    """Overwrite `target`, on any device, with `values` of the host; likewise."""
    if target.device.type == "cuda":
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)
