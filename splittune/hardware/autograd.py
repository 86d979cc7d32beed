"""What autograd still does and holds after a backward pass that failed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def finish_backward(devices: Sequence[torch.device | str] = ()) -> None:
    """Wait until autograd's thread of each device is idle, and have it drop what a failed backward left ready to run.

    A backward that fails on one device may raise while another device's thread is in the midst of a node, and holds
    memory: where the thread that called it was at work itself, on the host, it leaves at once. Each device has one
    such thread, with one queue; so an empty backward there, of a tensor without elements, comes back after what was
    before it. One on the host drops what the failed one has left in this thread.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        for device in ("cpu", *devices):
            nothing = torch.empty(0, device=device, requires_grad=True)
            nothing.backward(torch.empty_like(nothing))
