"""TP ranks: two processes, each with a decode world of its own, in lock step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from decode_world import Receiver, World
from sglang.srt.disaggregation.common.delta_receiver import DeltaReceiver
from sglang.srt.disaggregation.decode import DecodeRequest


class LateReceiver(Receiver):
    """As the real ones do, it reports success only when the metadata is there."""

    once_metadata_landed = DeltaReceiver.once_metadata_landed

    @property
    def kv_mgr(self) -> SimpleNamespace:
        manager = super().kv_mgr
        manager.record_failure = lambda room, reason: None
        return manager

    def _is_overdue(self) -> bool:
        return False

    @property
    def bootstrap_room(self) -> int | None:
        return self.req.bootstrap_room

    def poll(self) -> int:
        return self.once_metadata_landed(self.state)


class Rank:
    """One rank's world and the decisions it took, step by step."""

    def __init__(self, rank: int, size: int = 128, group: Any = None, options: dict | None = None) -> None:
        world = World(size=size, group=group or dist.group.WORLD, options=options)
        self.rank, self.world, self.decisions = rank, world, []

    def arrive(self, prompt: list[int], **options: Any) -> DecodeRequest:
        decode_req = self.world.arrive(prompt, **options)
        decode_req.kv_receiver.__class__ = LateReceiver
        return decode_req

    def step(self) -> None:
        world = self.world
        before = [dr.req for dr in world.transfer.queue]
        ready = world.step()
        admitted = [dr.req for dr in world.transfer.queue if dr.req not in before]
        self.decisions.append(
            (
                [(req.rid, req.decode_prefix_len) for req in admitted],
                [req.rid for req in ready],
                [req.rid for req in world.streamed],
                world.allocator.available_size(),
                sorted(len(node.key) for node in world._nodes()),
            )
        )
        world.check()

    def run(self, plan: dict[int, list[Callable[[], Any]]], steps: int = 16) -> list[tuple]:
        """Do what ``plan`` has for a step before it."""
        for n in range(steps):
            for act in plan.get(n, []):
                act()
            self.step()
        return self.decisions


def serve_in_step(me: Rank, prompt: list[int]) -> None:
    request = me.arrive(prompt)
    me.world.handshake(request)
    me.step()
    me.world.complete(request)
    me.step()
    me.world.finish(request.req)
