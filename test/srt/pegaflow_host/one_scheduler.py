"""A real scheduler with its model and overlapped loop, in a process without servers, on a real PegaFlow server.

    python one_scheduler.py MODE MODEL ENDPOINT [RANKS]      MODE: null (aggregated), prefill or decode

With RANKS above 1 it starts the other TP ranks itself; what happens in a step is, as in the engine, what the first rank
has broadcast.

It is given the same prompts twice, with its device cache flushed in between, and then one whose peer never comes, which
is aborted. Prints a JSON object. With `engine/` on PYTHONPATH its pool can be mapped.

A prefill worker has the engine's own stand-in for a peer (its fake bootstrap host). A decode worker has one made here:
KV drawn at random from the tokens, so that the model's answer depends on every byte of it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
import zlib
from types import SimpleNamespace

import torch

PAGE = 16
FAKE_HOST, NOBODY = "2.2.2.2", "10.255.255.1"
FLUSH = "flush"
ROLES = {
    "null": [],
    "prefill": ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"],
    "decode": [
        *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"),
        "--disaggregation-decode-enable-radix-cache",
    ],
}


class LoopEnds(BaseException):
    """Thrown into the loop, which has no end of its own."""


def end_with(parent: int) -> None:
    """A rank whose first rank is gone would wait for it in a collective."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def make_scheduler(options: list[str], rank: int = 0, refused: bool = False):
    """One TP rank with ``options``, beside those of a CPU host. refused: whether to start what servers refuse."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, prepare_server_args

    host = ["--device", "cpu", "--attention-backend", "torch_batched", "--dtype", "float32", "--skip-tokenizer-init"]
    args = prepare_server_args(host + options)
    if not refused:
        args.check_server_args()
    scheduler = Scheduler(args, PortArgs.init_new(args), 0, rank, 0, 0, 0, 0, None)
    scheduler.schedule_stream = scheduler.device_module.current_stream()
    return scheduler


def options_of(mode: str, model: str, endpoint: str, ranks: int, port: int) -> list[str]:
    options = ["--model-path", model, "--max-total-tokens", "8192", "--max-running-requests", "16"]
    options += ["--page-size", str(PAGE), "--chunked-prefill-size", "128"]
    options += ["--enable-pegaflow", "--pegaflow-endpoint", endpoint]
    if ranks > 1:
        options += ["--tp-size", str(ranks), "--nccl-port", str(port)]
    return options + ROLES[mode]


def make_request(rid: str, tokens: list[int], max_new: int, stream: bool = False, **peer):
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=max_new, temperature=0, ignore_eos=True)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text="",
        input_ids=list(tokens),
        mm_inputs=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=stream,
        **peer,
    )


def stand_in_for_prefill(scheduler, prompts: dict[int, list[int]], prefixes: list[int]) -> None:
    """Have requests of the fake bootstrap host served as real ones, with KV drawn from their tokens."""
    from sglang.srt.disaggregation.fake.conn import FakeKVReceiver

    init = FakeKVReceiver.__init__

    def remember(receiver, *args, bootstrap_room=None, **kwargs):
        init(receiver, *args, bootstrap_room=bootstrap_room, **kwargs)
        receiver.room = bootstrap_room

    def send(receiver, pages, index, state=None, decode_prefix_len=None):
        tokens, kv = prompts[receiver.room], scheduler.token_to_kv_pool_allocator.get_kvcache()
        prefixes.append(decode_prefix_len)
        slots = [int(page) * PAGE + i for page in pages for i in range(PAGE)]
        for end, slot in enumerate(slots[: len(tokens) - decode_prefix_len], decode_prefix_len + 1):
            drawn = torch.Generator().manual_seed(zlib.crc32(repr(tokens[:end]).encode()))
            for buffer in [*kv.kv_buffer] if hasattr(kv, "kv_buffer") else [*kv.k_buffer, *kv.v_buffer]:
                buffer[slot] = torch.randn(buffer.shape[1:], generator=drawn)
        metadata = scheduler.disagg_metadata_buffers
        metadata.output_ids[index, 0] = 500 + zlib.crc32(repr(tokens).encode()) % 1000
        metadata.bootstrap_room[index, 0] = receiver.room
        receiver.has_sent_metadata = True

    FakeKVReceiver.__init__, FakeKVReceiver.send_metadata = remember, send
    FakeKVReceiver.peer_takes_prefix = FakeKVReceiver.carries_prefix = FakeKVReceiver.fenced = True
    FakeKVReceiver.metadata_room, FakeKVReceiver.require_staging = None, False
    FakeKVReceiver.clear = FakeKVReceiver.abort = FakeKVReceiver.cancel = lambda receiver: None
    FakeKVReceiver.writers_done = lambda receiver: True
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang") and "is_warmup" in vars(module):
            module.is_warmup = lambda req: False
    # Patch files run in namespaces of their own.
    for method in (type(scheduler.disagg_decode_prealloc_queue).add, type(scheduler.tree_cache).accepts):
        method.__globals__["is_warmup"] = lambda req: False


def main(mode: str, model: str, endpoint: str, ranks: int = 1, rank: int = 0, port: int = 0) -> None:
    from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput

    torch.set_num_threads(1)
    if ranks > 1 and not rank:
        from sglang_pd_radix.tools.cluster import free_ports

        (port,) = free_ports(1)
        others = [str(value) for value in (mode, model, endpoint, ranks)]
        for other in range(1, ranks):
            subprocess.Popen([sys.executable, "-W", "ignore", __file__, *others, str(other), str(port)], stdout=2)
    if rank:
        threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    # Pairs of several ranks are refused until servers have run.
    scheduler = make_scheduler(options_of(mode, model, endpoint, ranks, port), rank, ranks > 1 and mode != "null")
    tree = scheduler.tree_cache
    sent: dict[int, list[int]] = {}
    numbers = itertools.count(1)
    prefixes: list[int] = []
    answers: dict[str, list[int]] = {}
    cached: dict[str, int] = {}

    def tell(message, req=None) -> None:
        for rid, ids, hit in zip(
            getattr(message, "rids", []),
            getattr(message, "output_ids", None) or [],
            getattr(message, "cached_tokens", None) or [],
            strict=False,
        ):
            answers[rid], cached[rid] = answers.get(rid, []) + list(ids), hit

    scheduler.send_to_tokenizer = scheduler.send_to_detokenizer = SimpleNamespace(send_output=tell)
    if mode == "decode":
        stand_in_for_prefill(scheduler, sent, prefixes)

    def request(tokens: list[int], host: str = FAKE_HOST):
        number = next(numbers)
        peer = {} if mode == "null" else {"bootstrap_host": host, "bootstrap_port": 1, "bootstrap_room": number}
        return make_request(f"r{number}", tokens, 1 if mode == "prefill" else 8, **peer)

    def remember(received) -> None:
        if isinstance(received, TokenizedGenerateReqInput):
            sent[int(received.rid[1:])] = list(received.input_ids)

    seen = {}

    def look(name: str) -> None:
        seen[name] = {**tree.pegaflow_state(), **scheduler.kv_pool_state()}

    def script():
        rnd = random.Random(1)
        prompts = [[rnd.randrange(400, 1900) for _ in range(300)] for _ in range(4)]
        for name in ("cold", "warm"):
            yield [request(tokens) for tokens in prompts]
            while not scheduler.is_fully_idle() or tree.busy:
                yield []
            look(name)
            yield [FLUSH]
            # What is saved is in the server's index soon after it has said so.
            end = time.monotonic() + 1
            while time.monotonic() < end:
                yield []
        last = request(prompts[0] + [7] * 5, NOBODY)
        yield [last]
        end = time.monotonic() + 2
        while mode != "null" and time.monotonic() < end:
            yield []
        yield [AbortReq(rid=last.rid)]
        end = time.monotonic() + 60
        while (not scheduler.is_fully_idle() or tree.busy) and time.monotonic() < end:
            yield []
        look("aborted")

    steps = script()

    def receive():
        received = [next(steps, None)] if rank == 0 else [None]
        if ranks > 1:
            torch.distributed.broadcast_object_list(received, src=0, group=scheduler.tp_cpu_group)
        if received[0] is None:
            raise LoopEnds
        if received[0] == [FLUSH]:
            assert scheduler.flush_cache()
            return []
        for one in received[0]:
            remember(one)
        return received[0]

    scheduler.recv_requests = receive
    loops = {"null": "", "prefill": "_disagg_prefill", "decode": "_disagg_decode"}
    try:
        getattr(scheduler, "event_loop_overlap" + loops[mode])()
    except LoopEnds:
        pass
    # Each rank's process goes when its own work is done.
    if rank:
        os._exit(0)
    result = {"tree": type(tree).__name__, "answers": answers, "cached": cached, "prefixes": prefixes, "seen": seen}
    print("\n" + json.dumps(result), flush=True)
    # Threads of the transfer library are still there.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
