"""NIXL agents for KV pools in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Longest wait of an agent's progress thread, microseconds. What comes in ends it at once.
PROGRESS_WAIT_US = 10_000


def _patch_nixl(module: Any) -> None:
    import wrapt

    class HostMemoryAgent(wrapt.ObjectProxy):
        """A NIXL agent for KV pools in host memory: what the engine calls VRAM is DRAM here."""

        def register_memory(self, reg_list: Any, mem_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__.register_memory(reg_list, _host_kind(mem_type), *args, **kwargs)

        def get_xfer_descs(self, descs: Any, mem_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__.get_xfer_descs(descs, _host_kind(mem_type), *args, **kwargs)

    @wrapt.patch_function_wrapper(module, "NixlKVManager.register_buffer_to_engine")
    def register(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        instance.agent = HostMemoryAgent(instance.agent)
        wrapped()


def _patch_nixl_api(module: Any) -> None:
    config = module.nixlBind.nixlAgentConfig

    class PatientConfig(config):  # type: ignore[misc, valid-type]
        """Lets an agent's progress thread wait for events; NIXL's Python layer makes it spin, idle or not."""

        @property
        def pthrDelay(self) -> int:
            delay: int = config.pthrDelay.__get__(self)
            return delay

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:
            config.pthrDelay.__set__(self, max(microseconds, PROGRESS_WAIT_US))

    module.nixlBind.nixlAgentConfig = PatientConfig


def _host_kind(mem_type: str | None) -> str | None:
    return "DRAM" if mem_type == "VRAM" else mem_type


HOOKS: dict[str, Callable[[Any], None]] = {
    "nixl_cu12._api": _patch_nixl_api,
    "nixl_cu13._api": _patch_nixl_api,
    "sglang.srt.disaggregation.nixl.conn": _patch_nixl,
}
