"""Tensor-parallel ranks decide alike: what rank 0 drafted and scored is what every rank plans with and learns from.

Logits can differ between ranks in their last bits (an all-reduce may add in another order), and ranks that admit
different lengths issue collectives of different sizes: they hang. So the inputs of every decision are rank 0's, bit by
bit; equal inputs give equal lengths, budgets and, as the learned sums are integers, equal coefficients.
"""

from typing import Any

import torch
from torch import Tensor


class Ranks:
    """group: SGLang's GroupCoordinator of the tensor-parallel ranks; None: there is one rank."""

    def __init__(self, group: Any = None) -> None:
        self._group = None if group is None or group.world_size == 1 else group
        self.alone = self._group is None
        self.is_first = self._group is None or self._group.rank_in_group == 0

    def share(self, *tensors: Tensor) -> None:
        """Overwrite contiguous tensors by those of rank 0, in one message; wider dtypes first."""
        if self._group is None:
            return
        flat = [each.view(-1).view(torch.uint8) for each in tensors]
        message = torch.cat(flat)
        self._group.broadcast(message, src=0)
        for own, received in zip(flat, message.split([each.numel() for each in flat]), strict=True):
            own.copy_(received)

    def gather(self, own: Tensor) -> Tensor:
        """[ranks, ...] of every rank's tensor, in one message."""
        if self._group is None:
            return own[None]
        flat = own.new_empty(self._group.world_size * own.numel())
        self._group.all_gather_into_tensor(flat, own.contiguous().view(-1))
        return flat.view(self._group.world_size, *own.shape)

    def share_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Waits for all of them: at start-up, or rarely."""
        return value if self._group is None else self._group.broadcast_object(value, src=0)
