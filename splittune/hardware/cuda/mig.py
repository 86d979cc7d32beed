"""MIG divides a card into instances: a job may run on one of them, never on several."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from splittune.errors import DeviceError

# "NVIDIA A100-SXM4-40GB MIG 1g.5gb", or "... MIG 1c.3g.20gb" where an instance is divided again
_INSTANCE_NAME = re.compile(r"\bMIG \d+[cg]\.")


def refuse_several_instances(names: Sequence[str], num_devices: int) -> None:
    """Refuse several devices if CUDA's name of any is that of a MIG instance.

    Raises:
        DeviceError: says why, and what to do.
    """
    if num_devices > 1 and any(_INSTANCE_NAME.search(name) for name in names):
        raise _refusal(f"the job names {num_devices} devices, and CUDA shows {', '.join(names)}")


def refuse_several_instances_in_environment() -> None:
    """Refuse all visible devices if CUDA_VISIBLE_DEVICES names several MIG instances.

    CUDA shows a process the first of them only.

    Raises:
        DeviceError: says why, and what to do.
    """
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip().startswith("MIG-")]
    if len(named) > 1:
        raise _refusal(f"CUDA_VISIBLE_DEVICES names {len(named)} MIG instances")


def _refusal(got: str) -> DeviceError:
    return DeviceError(
        f"{got}: expected one MIG instance alone. CUDA shows a process one instance only, and instances cannot copy to "
        'one another, so a batch cannot be split over them. Tune on one with devices=["cuda:0"], or switch MIG off '
        "on the cards (`nvidia-smi -mig 0`, as root) and name whole ones."
    )
