"""What a `Cluster` makes of options, devices, ports and logs. Nothing is started."""

from __future__ import annotations

import argparse
import os
import random
import socket
from pathlib import Path

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cluster as cluster_module
from sglang_pd_radix.tools.cluster import (
    Cluster,
    compared_on,
    cpu_options,
    describe_exit,
    failure_reason,
    free_ports,
    gpu_placement,
    has_option,
    log_tail,
    option_value,
    per_worker,
)
from sglang_pd_radix.tools.cluster.options import connectable


@pytest.mark.parametrize(("host", "reached"), [("[::1]", "[::1]"), ("::1", "[::1]"), ("[::]", "[::1]"), ("h", "h")])
def test_an_address_may_stand_in_brackets(host, reached):
    assert connectable(host) == reached


def test_option_lookup():
    args = ["--tp", "2", "--dtype=float16", "--tp", "4"]
    assert has_option(args, "--dtype") and has_option(args, "--x", "--tp") and not has_option(args, "--d")
    assert option_value(args, "--tp", "--tp-size") == "4"
    assert option_value(args, "--dtype") == "float16"
    assert option_value(args, "--x") is None and option_value(["--x"], "--x") is None


def test_worker_arguments_for_all_or_for_each():
    assert per_worker([], 2, "x") == [[], []]
    assert per_worker(["--a", "1"], 2, "x") == [["--a", "1"]] * 2
    assert per_worker([["--a"], []], 2, "x") == [["--a"], []]
    for wrong in ([["--a"]], [["--a"], "--b"]):
        with pytest.raises(PdRadixError, match="2 lists"):
            per_worker(wrong, 2, "x")


def test_cpu_options_yield_to_the_users():
    assert {"--device", "--attention-backend", "--dtype"} <= set(cpu_options([]))
    # CPU hosts run overlapped too.
    assert "--disable-overlap-schedule" not in cpu_options([])
    given = ["--device=cpu", "--dtype", "bfloat16", "--mem-fraction-static", "0.1"]
    added = cpu_options(given)
    assert not {"--device", "--dtype", "--max-total-tokens"} & set(added)


def test_gpus_are_given_out_in_turn_and_shared_when_scarce():
    def gpus(placement):
        return [(option_value(extra, "--base-gpu-id"), wave) for extra, wave in placement]

    assert gpus(gpu_placement([[], ["--tp", "2"], []], 4)) == [("0", 0), ("1", 0), ("3", 0)]
    assert gpu_placement([[], []], 0) == [([], 0), ([], 0)]
    shared = gpu_placement([[], []], 1)
    assert gpus(shared) == [("0", 0), ("0", 1)]
    first, second = (float(option_value(extra, "--mem-fraction-static")) for extra, _ in shared)
    # The second part is of what the first one left.
    assert first == pytest.approx((1 - first) * second, rel=0.01) and first + (1 - first) * second < 0.9
    # Pools of a size that is told, and nearly all for each: no need to wait for each other. Else what one takes while
    # another starts would be taken from its part.
    sized = ["--mem-fraction-static", "0.8", "--max-total-tokens=4096"]
    assert gpu_placement([sized, sized, sized], 1) == [(["--base-gpu-id", "0"], 0)] * 3
    assert gpus(gpu_placement([sized, sized[:2]], 1)) == [("0", 0), ("0", 1)]
    parts = ["--mem-fraction-static", "0.25", "--max-total-tokens=4096"]
    assert gpus(gpu_placement([parts, parts], 1)) == [("0", 0), ("0", 1)]


def test_what_is_compared_is_on_the_same_gpus():
    """Else one side of two GPUs would have one for itself, and the other would share prefill's."""
    assert compared_on([], sides=[[], []], gpus=1) == [[], []]
    assert compared_on([], sides=[[], []], gpus=2) == [["--base-gpu-id", "1"]] * 2
    assert compared_on(["--tp", "2"], sides=[[], []], gpus=6) == [["--base-gpu-id", "2"]] * 2
    assert compared_on(["--tp", "2"], sides=[[], [], []], gpus=3) == [[]] * 3
    assert compared_on(["--base-gpu-id", "0"], sides=[[], []], gpus=8) == [[], []]
    # A side that takes more GPUs than prefill and the others: room for it, or all on the first ones.
    larger = [[], [], ["--tp", "2"]]
    assert compared_on([], larger, 4) == [["--base-gpu-id", "2"]] * 3
    assert compared_on([], larger, 2) == [["--base-gpu-id", "0"]] * 3
    placed = gpu_placement(
        [[], *([*side, *at] for side, at in zip(larger, compared_on([], larger, 2), strict=True))], 2
    )
    assert [wave for _, wave in placed] == [0, 1, 2, 3]
    assert compared_on([], [[], ["--base-gpu-id", "3"]], 4) == [["--base-gpu-id", "1"], []]
    # Prefill alone on the first GPU, and on the second one after the other, each with its part.
    (prefill, first), *decode = gpu_placement([[], *compared_on([], [[], []], 2)], 2)
    assert prefill[:2] == ["--base-gpu-id", "0"] and (first, [wave for _, wave in decode]) == (0, [0, 1])
    assert all("--base-gpu-id" not in extra and "--mem-fraction-static" in extra for extra, _ in decode)
    with pytest.raises(PdRadixError, match="--base-gpu-id takes a number"):
        gpu_placement([["--base-gpu-id", "x"]], 2)
    with pytest.raises(PdRadixError, match="--mem-fraction-static takes a number"):
        gpu_placement([["--mem-fraction-static", "most"], []], 1)
    assert gpu_placement([["--base-gpu-id", "3"], []], 4)[0] == ([], 0)
    with pytest.raises(PdRadixError, match="needs 2 GPUs from --base-gpu-id 3 on, and this machine has 4"):
        gpu_placement([["--base-gpu-id", "3", "--tp", "2"], []], 4)
    with pytest.raises(PdRadixError, match="needs 2 GPUs"):
        gpu_placement([["--tp=2"]], 1)


def test_dp_ranks_have_gpus_of_their_own_unless_they_share_attention():
    ranks = ["--dp-size", "2"]
    assert [option_value(extra, "--base-gpu-id") for extra, _ in gpu_placement([ranks, ranks], 4)] == ["0", "2"]
    assert [wave for _, wave in gpu_placement([ranks, ranks], 2)] == [0, 1]
    with pytest.raises(PdRadixError, match="needs 2 GPUs and this machine has 1: lower --tp or --dp-size"):
        gpu_placement([ranks, ranks], 1)
    shared = ["--tp", "2", "--data-parallel-size=2", "--enable-dp-attention"]
    assert [option_value(extra, "--base-gpu-id") for extra, _ in gpu_placement([shared, shared], 4)] == ["0", "2"]
    assert compared_on(ranks, [[], []], 6) == [["--base-gpu-id", "2"]] * 2
    with pytest.raises(PdRadixError, match="--tp, --pp-size and --dp-size take a number"):
        gpu_placement([["--dp-size", "x"]], 1)


@pytest.mark.parametrize(
    "option",
    ["--tp", "--tp-size", "--tensor-parallel", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel"]
    + ["--pipeline-parallel-size", "--dp", "--dp-size", "--data-parallel", "--data-parallel-size"],
)
def test_ranks_are_counted_as_the_engine_reads_them(option, tmp_path, monkeypatch):
    """It takes what an option begins with, too."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    read = parser.parse_args(["--model-path", "m", option, "2"])
    assert read.tensor_parallel_size * read.pipeline_parallel_size * read.data_parallel_size == 2
    assert [option_value(extra, "--base-gpu-id") for extra, _ in gpu_placement([[option, "2"]] * 2, 4)] == ["0", "2"]
    # The ranks of --dp-size would all be given the port that is named.
    monkeypatch.setattr(cluster_module.plan.cpu_host, "active", lambda: True)
    for worker in Cluster("m", log_dir=tmp_path, common_args=[option, "2"]).plan():
        if worker.is_worker:
            assert has_option(worker.command, "--nccl-port") is (read.data_parallel_size == 1)


def test_threads_of_all_ranks_are_as_many_as_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(cluster_module.plan.cpu_host, "active", lambda: True)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(*args):
        plan = Cluster("m", log_dir=tmp_path, common_args=args, decode=3).plan()
        return {process.env["OMP_NUM_THREADS"] for process in plan if process.is_worker}

    assert (threads(), threads("--tp", "2"), threads("--dp-size", "2", "--tp", "2")) == ({"4"}, {"2"}, {"1"})


# -- ports, logs, reasons


def test_ports_are_free_different_and_outside_the_ephemeral_range():
    ports = free_ports(20)
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20 and (first_ephemeral <= 11000 or max(ports) < first_ephemeral)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_no_port_is_one_that_mooncake_takes_by_lot():
    """A server that has yet to bind its own would find it taken: its clients spoke to a transfer engine."""
    for offsets in ((0,), cluster_module.DP_ATTENTION_OFFSETS):
        for port in free_ports(300, offsets=offsets):
            assert not any(15000 <= port + offset <= 17000 for offset in offsets)


def ports_of(cluster: Cluster) -> list[int]:
    """All on which its servers will listen, with what an engine with DP attention counts from its own."""
    ports: list[int] = []
    for process in cluster.plan():
        offsets = cluster_module.DP_ATTENTION_OFFSETS if "--enable-dp-attention" in process.command else (0,)
        ports += [int(option_value(process.command, "--port")) + offset for offset in offsets]
        for option in ("--nccl-port", "--disaggregation-bootstrap-port", "--prometheus-port"):
            value = option_value(process.command, option)
            ports += [int(value)] if value else []
    return ports


class OneByOne(random.Random):
    """Takes what comes first, where a choice by chance would seldom show that two take the same."""

    def sample(self, population, k):
        return population[:k]


@pytest.mark.parametrize("dp_attention", [False, True])
def test_no_two_servers_get_the_same_port(monkeypatch, dp_attention):
    """Also none that is the user's own choice, or that an engine with DP attention takes beside the one it is given."""
    monkeypatch.setattr(cluster_module.ports.random, "Random", OneByOne)
    first = 10000
    options = ["--enable-dp-attention", "--dp-size", "2"] if dp_attention else []
    router = ["--prometheus-port", str(first + 3)]
    pair = Cluster("m", prefill=2, decode=2, common_args=options, port=first + 1, router_args=router)
    single = Cluster("m", aggregated=True, aggregated_args=[*options, f"--nccl-port={first + 2}"], port=first + 5)
    for cluster in (pair, single):
        ports = ports_of(cluster)
        assert cluster.spec.port in ports and len(set(ports)) == len(ports)


def test_what_is_counted_from_a_port_is_free_too():
    with socket.socket() as listening:
        (port,) = free_ports(1, offsets=(0, 1))
        listening.bind(("127.0.0.1", port + 1))
        many = free_ports(50, taken=range(port - 20, port), offsets=(0, 1))
    assert port not in many and port + 1 not in many and not {*many} & {*range(port - 21, port)}


def test_log_tail_is_plain_and_short(tmp_path):
    log = tmp_path / "x.log"
    assert log_tail(log) == []
    log.write_bytes(b"".join(b"\x1b[31mline %d\x1b[0m\n\n" % i for i in range(50000)) + b"\xff end")
    assert log_tail(log, 2) == ["line 49999", "\ufffd end"]


@pytest.mark.parametrize(
    "lines, reason",
    [
        (["a", "ValueError: bad", "EOFError"], "ValueError: bad"),
        (["ValueError: first", "torch.OutOfMemoryError: second", "x"], "torch.OutOfMemoryError: second"),
        (
            ["sglang serve: error: unrecognized arguments: --x"],
            "sglang serve: error: unrecognized arguments: --x",
        ),
        (["[2026-01-01 00:00:00] RuntimeError: deep"], "[2026-01-01 00:00:00] RuntimeError: deep"),
        (
            ["12:00 Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering", "EOFError"],
            "Subprocess scheduler_0 (pid=7) crashed with exit code -9",
        ),
        (["EOFError"], "EOFError"),
        (["an Error happened in the middle of a line", "all fine"], None),
    ],
)
def test_reason_is_the_error_that_came_first_in_cause(lines, reason):
    assert failure_reason(lines) == reason


def test_exit_codes_in_words():
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert "signal 77" in describe_exit(-77)
