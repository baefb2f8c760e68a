"""Reading a number off the device after the fact, so that the step never waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Watch:
    """Carries a small tensor from its device to the host in the background."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._event: torch.Event | None = None

    def post(self, tensor: Tensor) -> None:
        """Starts to carry ``tensor`` over; what was posted before is forgotten."""
        if tensor.device.type == "cpu":
            self._copy = tensor.clone()
            return
        if self._copy is None:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.Event(tensor.device)
        self._event.record()

    def read(self, *, wait: bool) -> Any:
        """The values last posted, as Python numbers; ``None`` if nothing was, or if they are on their way still.

        Args:
            wait: wait for values that are on their way. Where results depend on them this keeps runs reproducible, and
                costs nothing when they were posted a step ago.
        """
        if self._copy is None:
            return None
        if self._event is not None:
            if not wait and not self._event.query():
                return None
            self._event.synchronize()
        return self._copy.tolist()
