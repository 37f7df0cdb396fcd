"""Which prefills drop what is computed here, and on which devices a prefill computes.

Upstream: none is known.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt import server_args
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.bootstrap_routes import add_to_registration
from sglang.srt.disaggregation.common.device_names import own_device
from sglang.srt.disaggregation.common.prefill_peers import listen_for

logger = logging.getLogger(__name__)

__all__ = ["CommonKVBootstrapServer", "CommonKVManager"]

# What a prefill says: it drops a request whose prompt decode computes, and which devices its ranks compute on. And by
# which name a rank says its own.
DROPS, DEVICES, RANK_DEVICE = "drops", "devices", "device"
listen_for(DROPS)
listen_for(DEVICES)
add_to_registration(RANK_DEVICE, own_device)


class CommonKVManager(engine.CommonKVManager):
    """Knows which prefills drop requests."""

    def __init__(self, *args, **kwargs):
        """Adds what this rank computes on. Here, since each thread has a device of its own."""
        self.own_device = own_device()
        super().__init__(*args, **kwargs)

    def drops(self, addr: str) -> bool:
        """Whether a prefill drops a request whose prompt is computed here.

        With ``auto`` none is asked to that computes on the same device: it would lose as much time as it saves.
        """
        return DROPS in self.prefills.of(addr).others and not self._is_spared(addr)

    def _is_spared(self, addr: str) -> bool:
        asked = getattr(self.server_args, "disaggregation_decode_local_prefill", None)
        devices = self.prefills.of(addr).others.get(DEVICES)
        return asked == "auto" and isinstance(devices, list) and self.own_device in devices

    def met_prefill(self, addr: str) -> None:
        """Tells of one that is not asked to."""
        if self._is_spared(addr):
            logger.info(
                "Prefill %s is on the same device as this worker, so local prefill is off for it. "
                "--disaggregation-decode-local-prefill N turns it on, up to N tokens.",
                addr,
            )
        super().met_prefill(addr)


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Says whether its prefill drops requests, and where it computes."""

    def _said_by_ranks(self) -> dict[str, Any]:
        """Adds the devices of the ranks, as far as they say them."""
        devices = sorted({device for device in self.ranks.said(RANK_DEVICE) if isinstance(device, str)})
        return super()._said_by_ranks() | ({DEVICES: devices} if devices else {})

    async def _capabilities(self) -> dict[str, Any]:
        """Stages would have to agree, and of several fronts only one learns of it."""
        answer = await super()._capabilities()
        fronts = getattr(server_args._global_server_args, "tokenizer_worker_num", 1)
        before = {name: answer[name] for name in ("version", "queued") if name in answer}
        return before | {DROPS: int(self.pp_size == 1 and self.attn_cp_size == 1 and fronts == 1)} | answer
