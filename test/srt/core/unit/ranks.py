"""TP ranks: two processes that meet in the collectives of what a test has them do."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Its processes are forked from one that has imported the engine.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["sglang.srt.managers.scheduler"])


class Pair:
    """Two processes that run the same scenario as ranks 0 and 1 of a group. Started once, since that takes long."""

    limit_s = 20

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts = folder, 0
        self.ranks: list[Any] = []
        self.pipes: list[multiprocessing.connection.Connection] = []

    def start(self) -> None:
        try:
            self._start()
        except BaseException:
            # Or each later scenario would hear of this start, and fail.
            self.stop()
            raise

    def _start(self) -> None:
        self.starts += 1
        store = self.folder / f"store{self.starts}"
        for rank in range(2):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_rank_main, args=(rank, str(store), theirs), daemon=True)
            process.start()
            self.ranks.append(process)
            self.pipes.append(ours)
        # The group's time-out is short: they meet in it when both have imported the engine, which takes as it takes.
        self._hear("a rank did not start")
        for pipe in self.pipes:
            pipe.send("meet")
        self._hear("the ranks did not meet")

    def _hear(self, otherwise: str) -> None:
        for pipe in self.pipes:
            assert pipe.poll(110), otherwise
            pipe.recv()

    def stop(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()
        self.ranks, self.pipes = [], []

    def run(self, scenario: Callable, *args: Any) -> list[Any]:
        """What ``scenario(rank, *args)`` returns on each rank; it is a function of a module.

        Fails, and ends the processes, if a rank hangs or raises.
        """
        if not self.ranks:
            self.start()
        for pipe in self.pipes:
            pipe.send((scenario, args))
        # To take it, a rank imports its module.
        self._hear("a rank did not take the scenario")
        answers = [pipe.recv() if pipe.poll(self.limit_s) else "hung: no answer" for pipe in self.pipes]
        if any(isinstance(answer, str) for answer in answers):
            self.stop()
            pytest.fail("\n".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers)))
        return answers


def _rank_main(rank: int, store: str, pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    pipe.send("here")
    pipe.recv()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=12)
    )
    pipe.send("ready")
    while True:
        scenario, args = pipe.recv()
        pipe.send("taken")
        try:
            pipe.send(scenario(rank, *args))
        except BaseException:
            pipe.send(traceback.format_exc())
            return


def assert_same(answers: list[list[tuple]]) -> list[tuple]:
    assert answers[0] == answers[1]
    return answers[0]
