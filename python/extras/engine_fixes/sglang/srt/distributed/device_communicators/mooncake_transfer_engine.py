"""What Mooncake's library says only in lines of its own log, or not at all, as one message of the server.

Upstream: none is known.
"""

from __future__ import annotations

import logging

from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as engine

from sglang_pd_radix.supplied import mooncake_host

logger = logging.getLogger(__name__)

__all__ = ["MooncakeTransferEngine"]


class MooncakeTransferEngine(engine.MooncakeTransferEngine):
    """Mooncake's engine that says over what it transfers, and what went wrong with which way out."""

    def initialize(self, hostname: str, device_name: str | None) -> None:
        """Adds the transport that the library will choose, and a way out when it does not start."""
        wire, hint = mooncake_host.transport(device_name)
        try:
            super().initialize(hostname, device_name)
        except RuntimeError as error:
            raise RuntimeError(
                f"Mooncake's transfer engine does not start on {hostname} for transfers over {wire}; the lines of its "
                f"own log above say why. Way out: {hint}; or --disaggregation-transfer-backend nixl on prefill and "
                "decode."
            ) from error
        logger.info("Mooncake transfers over %s.", wire)

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        """Adds an error where memory cannot be registered, which the engine takes no notice of.

        Every transfer from or to that memory would fail later, each with an error that does not say so.
        """
        result = super().batch_register(ptrs, lengths)
        if result != 0:
            logger.error(
                "Mooncake could not register %d buffers of together %d MiB (code %s): transfers of them will fail. "
                "For RDMA the process must be allowed to lock that much memory (ulimit -l unlimited; in a container "
                "--ulimit memlock=-1), and GPU memory needs the kernel module nvidia_peermem or a driver with DMA-BUF.",
                len(ptrs),
                sum(lengths) >> 20,
                result,
            )
        return result
