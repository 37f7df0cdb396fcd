"""What one NIXL transfer of a request's KV takes between two processes on this machine.

One transfer at a time, of scattered pages of several buffers in host memory, with nothing else in the processes. Prints
medians over the transfers after the first ten, in milliseconds: all of it (from building the descriptors until the
receiver has read the notification), building the descriptors, and posting.

    python benchmark/bench_nixl.py [--threads N] [--wait poll|sleep] [--pages N] [--patient]

``--wait poll``: both processes ask without a break whether it is done, as the engine's schedulers do; ``sleep``: with
50 us between two questions. ``--patient``: the agents' progress threads wait for events, as this package has them do on
CPU hosts; without it they spin, as NIXL's Python layer has them. ``UCX_TLS`` and other variables of UCX work as usual.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from sglang_pd_radix.supplied import cpu_host

BUFFERS, PAGE_BYTES, PAGES = 8, 32 * 1024, 2048
SKIPPED = 10


def agent(name: str, threads: int) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"], num_threads=threads))


def buffers(of: Any) -> list[np.ndarray]:
    """Memory that ``of`` may read and write: one array per buffer."""
    made = [np.ones(PAGES * PAGE_BYTES, dtype=np.uint8) for _ in range(BUFFERS)]
    of.register_memory(of.get_reg_descs([(b.ctypes.data, b.nbytes, 0, "") for b in made], "DRAM"))
    return made


def pause(wait: str) -> None:
    if wait == "sleep":
        time.sleep(50e-6)


def receive(pipe: Connection, wait: str) -> None:
    """The decode side: tell when each notification has been read, for ever."""
    own = agent("receiver", 0)
    made = buffers(own)
    pipe.send((own.get_agent_metadata(), [b.ctypes.data for b in made]))
    while True:
        for messages in own.get_new_notifs().values():
            for _ in messages:
                pipe.send(time.perf_counter())
        pause(wait)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=8, help="worker threads of the sending agent (default: 8)")
    parser.add_argument("--wait", choices=("poll", "sleep"), default="poll")
    parser.add_argument("--pages", type=int, default=35, help="pages of each buffer per transfer (default: 35)")
    parser.add_argument("--transfers", type=int, default=60, help=f"how many, {SKIPPED} of them not counted")
    parser.add_argument("--patient", action="store_true", help="progress threads wait for events")
    args = parser.parse_args()
    if not 1 <= args.pages <= PAGES or args.transfers <= SKIPPED or args.threads < 0:
        parser.error(f"--pages is 1 to {PAGES}, --transfers above {SKIPPED}, --threads at least 0")
    if args.patient:
        from nixl import _api

        cpu_host.nixl._patch_nixl_api(_api)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=receive, args=(there, args.wait), daemon=True)
    process.start()
    own = agent("sender", args.threads)
    made = buffers(own)
    metadata, addresses = here.recv()
    peer = own.add_remote_agent(metadata)
    rng = np.random.default_rng(0)
    whole, built, posted = [], [], []

    def descriptors(starts: list[int], pages: np.ndarray) -> Any:
        sizes = np.full_like(pages, PAGE_BYTES)
        rows = [np.column_stack((start + pages * PAGE_BYTES, sizes, np.zeros_like(pages))) for start in starts]
        return own.get_xfer_descs(np.concatenate(rows), "DRAM")

    for _ in range(args.transfers):
        source, target = (rng.permutation(PAGES)[: args.pages].astype(np.int64) for _ in range(2))
        begun = time.perf_counter()
        theirs = descriptors(addresses, target)
        ours = descriptors([b.ctypes.data for b in made], source)
        ready = time.perf_counter()
        handle = own.initialize_xfer("WRITE", ours, theirs, peer, b"done")
        before_post = time.perf_counter()
        own.transfer(handle)
        after_post = time.perf_counter()
        while not here.poll(0):
            own.check_xfer_state(handle)
            pause(args.wait)
        whole.append(here.recv() - begun)
        built.append(ready - begun)
        posted.append(after_post - before_post)
        while own.check_xfer_state(handle) != "DONE":
            pause(args.wait)
        own.release_xfer_handle(handle)
    mib = args.pages * PAGE_BYTES * BUFFERS / 2**20
    medians = [1e3 * statistics.median(times[SKIPPED:]) for times in (whole, built, posted)]
    print(
        f"{args.threads} threads, {args.wait}{', patient' * args.patient}: {mib:.1f} MiB in "
        f"{args.pages * BUFFERS} pieces: {medians[0]:.2f} ms, "
        f"of it building descriptors {medians[1]:.2f}, posting {medians[2]:.2f}",
        flush=True,
    )
    # Seen not to end by themselves: the threads of an agent whose peer is gone.
    process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
