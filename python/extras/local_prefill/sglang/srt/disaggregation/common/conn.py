"""Prefills' support for cancelling requests, and the devices of their ranks.

Upstream: none is known.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt import server_args
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.bootstrap_routes import ADDED_BY_RANKS
from sglang.srt.disaggregation.common.device_names import own_device

logger = logging.getLogger(__name__)

__all__ = ["CommonKVBootstrapServer", "CommonKVManager"]

# Capabilities of a prefill: it cancels requests whose prompts decode computes; devices of its ranks. In a rank's
# registration: its device.
DROPS, DEVICES, RANK_DEVICE = "drops", "devices", "device"
ADDED_BY_RANKS[RANK_DEVICE] = own_device


class CommonKVManager(engine.CommonKVManager):
    """Knows which prefills support cancelling requests."""

    def __init__(self, *args, **kwargs):
        """Reads this rank's device; here, because each thread has its own current device."""
        self.own_device = own_device()
        super().__init__(*args, **kwargs)

    def drops(self, addr: str) -> bool:
        """Whether local prefill may be used with this prefill.

        Not if prefill lacks support, nor with ``auto`` if it uses the same GPU: it would lose the time that is saved.
        """
        return DROPS in self.prefills.of(addr).others and not self._is_spared(addr)

    def _is_spared(self, addr: str) -> bool:
        asked = getattr(self.server_args, "disaggregation_decode_local_prefill", None)
        devices = self.prefills.of(addr).others.get(DEVICES)
        return asked == "auto" and isinstance(devices, list) and self.own_device in devices

    def met_prefill(self, addr: str) -> None:
        """Logs a prefill that is excluded since it uses the same GPU."""
        if self._is_spared(addr):
            logger.info(
                "Prefill %s is on the same device as this worker, so local prefill is off for it. "
                "--disaggregation-decode-local-prefill N turns it on, up to N tokens.",
                addr,
            )
        super().met_prefill(addr)


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Reports whether its prefill cancels requests, and its devices."""

    def _said_by_ranks(self) -> dict[str, Any]:
        """Adds the devices of ranks that registered one."""
        devices = sorted({device for device in self.ranks.said(RANK_DEVICE) if isinstance(device, str)})
        return super()._said_by_ranks() | ({DEVICES: devices} if devices else {})

    async def _capabilities(self) -> dict[str, Any]:
        """Adds cancellation; not with several stages, which would have to agree, or fronts: only one is notified."""
        answer = await super()._capabilities()
        fronts = getattr(server_args._global_server_args, "tokenizer_worker_num", 1)
        before = {name: answer[name] for name in ("version", "queued") if name in answer}
        return before | {DROPS: int(self.pp_size == 1 and self.attn_cp_size == 1 and fronts == 1)} | answer
