"""Which weights the KV in this worker's tree is of, so that prefill reads none of others from decode.

Counts of updates would not tell: an update fails on one side alone, a worker is started anew with what the other has
been given by updates. So the weights themselves are summed up.

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["KvWeights", "know_weights", "sum_of_weights", "weights_of"]

logger = logging.getLogger(__name__)


def sum_of_weights(parameters: Iterable[tuple[str, torch.Tensor]]) -> int | None:
    """A figure from 0 to 2**63 - 1 of a rank's parameters: of each the name, shape, type, and the sum of its bits.

    Reads all of them once, where they are. None if one has no data (is of the device ``meta``).
    """
    told: list[str] = []
    sums: list[torch.Tensor] = []
    for name, parameter in parameters:
        data = parameter.detach()
        if data.is_meta:
            return None
        told.append(f"{name} {tuple(data.shape)} {data.dtype}")
        sums += [one.to(sums[0].device if sums else one.device) for one in _sums_of_bits(data)]
    # One wait for the device, and not one for each.
    all_sums = torch.stack(sums).tolist() if sums else []
    text = repr((told, all_sums)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _sums_of_bits(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of its memory's words of 8 bytes, modulo 2**64, and of the bytes after them.

    Torch sums integers of 8 bytes where they are. Of others it makes a copy in that type first: of an embedding in
    bfloat16 one of four times its size.
    """
    # What is transposed is taken as it lies.
    as_it_lies = data.permute(sorted(range(data.dim()), key=data.stride, reverse=True))
    octets = as_it_lies.reshape(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64).sum(), octets[whole:].sum(dtype=torch.int64)


class KvWeights:
    """Of one rank. Used by its scheduler's thread alone."""

    def __init__(self, model: Callable[[], Any] | None) -> None:
        """model: with ``named_parameters``; None where nothing is known of it."""
        self._model = model
        self._sum: int | None = None
        # Whether the weights have changed, or an update has failed, and the tree has not been emptied since.
        self._is_mixed = False

    def current(self) -> int | None:
        """`sum_of_weights` that all KV in the tree is of; None if some may be of others, or that is not known.

        Costs a pass over the weights the first time, and again after each update.
        """
        if self._is_mixed or self._model is None:
            return None
        if self._sum is None:
            try:
                self._sum = sum_of_weights(self._model().named_parameters())
            except Exception:
                # Of torchao's tensors there are no bits to be had, on a full device no memory: no reason to end here.
                logger.exception("The weights cannot be summed up: prefill reads nothing from decode")
            if self._sum is None:
                # Who asks is a request: the pass would be made for each.
                self._model = None
        return self._sum

    def changing(self) -> None:
        """The weights are about to be updated, whatever comes of it."""
        self._sum, self._is_mixed = None, True

    def flushed(self) -> None:
        """The tree has been emptied."""
        self._is_mixed = False


_UNKNOWN = KvWeights(None)


def weights_of(manager: Any) -> KvWeights:
    """Those of the rank of a manager; None is that of a worker without disaggregation."""
    return getattr(manager, "kv_weights", _UNKNOWN)


def know_weights(manager: Any, scheduler: Any) -> Any:
    """The manager of a rank, which now knows the weights of its KV."""
    manager.kv_weights = KvWeights(lambda: scheduler.tp_worker.model_runner.model)
    return manager
