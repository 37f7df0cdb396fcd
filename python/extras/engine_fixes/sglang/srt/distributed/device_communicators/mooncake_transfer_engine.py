"""Reports facts and errors of Mooncake that are only in its own log, or nowhere.

Upstream: none is known.
"""

from __future__ import annotations

import logging

from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as engine

from sglang_pd_radix.supplied import mooncake_host

logger = logging.getLogger(__name__)

__all__ = ["MooncakeTransferEngine"]


class MooncakeTransferEngine(engine.MooncakeTransferEngine):
    """Mooncake's engine that logs its transport, and reports errors with a remedy."""

    def initialize(self, hostname: str, device_name: str | None) -> None:
        """Logs the transport that the library chooses; adds a remedy to a start-up error."""
        wire, hint = mooncake_host.transport(device_name)
        try:
            super().initialize(hostname, device_name)
        except RuntimeError as error:
            raise RuntimeError(
                f"Mooncake's transfer engine does not start on {hostname} for transfers over {wire}; see the lines of "
                f"its own log above. Remedy: {hint}; or --disaggregation-transfer-backend nixl on prefill and "
                "decode."
            ) from error
        logger.info("Mooncake transfers over %s.", wire)

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        """Logs an error if memory cannot be registered, which the engine ignores.

        Every transfer of that memory would fail later, with an unrelated error.
        """
        result = super().batch_register(ptrs, lengths)
        if result != 0:
            logger.error(
                "Mooncake could not register %d buffers, %d MiB in total (code %s): transfers of them will fail. "
                "For RDMA the process must be allowed to lock that much memory (ulimit -l unlimited; in a container "
                "--ulimit memlock=-1), and GPU memory needs the kernel module nvidia_peermem or a driver with DMA-BUF.",
                len(ptrs),
                sum(lengths) >> 20,
                result,
            )
        return result
