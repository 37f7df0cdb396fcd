"""`Cluster` with stand-ins for the servers: how they start, are paused, end, and what of it is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import host_server
import pytest
from fake_servers import PACKAGE_ROOT, start_up
from waiting import until

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.cluster import GATEWAYS, SGLANG_ROUTER, SMG, Cluster, http, option_value
from sglang_pd_radix.tools.cluster.startup import Startup


def test_cluster_serves_and_leaves_nothing(fake, tmp_path):
    seen = []
    with Cluster(
        "m",
        prefill=2,
        decode=2,
        commands=fake,
        common_args=["--c", "1"],
        prefill_args=[["--p", "a"], ["--p", "b"]],
        decode_args=[["--d"], ["--dp-size", "2"]],
        prefill_env=[{"EXTRA": "one"}, {}],
        env={"OMP_NUM_THREADS": "7"},
        router_args=["--policy", "random"],
        log_dir=tmp_path / "logs",
        on_progress=seen.append,
    ) as cluster:
        assert cluster.alive() and cluster.dead() is None
        assert len(cluster.prefill_urls) == len(cluster.decode_urls) == 2
        answers = [json.loads(http(url + "/generate", {})[1]) for url in (*cluster.prefill_urls, *cluster.decode_urls)]
        assert [answer["role"] for answer in answers] == ["prefill", "prefill", "decode", "decode"]
        assert [answer["extra"] for answer in answers] == ["one", None, None, None]
        # What is set stays; and an idle connection outlasts the router's patience with it.
        assert all(answer["omp"] == "7" for answer in answers)
        assert answers[0]["args"][-4:] == ["--c", "1", "--p", "a"]
        assert answers[1]["args"][-4:] == ["--c", "1", "--p", "b"]
        assert answers[2]["args"][-3:] == ["--c", "1", "--d"]
        # Engines of one worker cannot share it.
        assert ["--nccl-port" in answer["args"] for answer in answers] == [True, True, True, False]
        router = json.loads(http(cluster.router_url + "/generate", {})[1])["args"]
        for process in cluster.processes:
            if process.role == "prefill":
                at = router.index(process.url)
                assert router[at - 1 : at + 2] == ["--prefill", process.url, str(process.bootstrap_port)]
        assert router[-2:] == ["--policy", "random"]
        document = json.loads(json.dumps(cluster.describe()))
        assert document["router_url"] == cluster.router_url
        assert [p["role"] for p in document["processes"]] == ["prefill", "prefill", "decode", "decode", "router"]
        assert all(Path(p["log"]).exists() and os.getpgid(p["pid"]) == p["pid"] for p in document["processes"])
        # What made sure that requests are served is not left in any cache.
        assert all("flushed" in p.log_path.read_text() for p in cluster.processes if p.role != "router")
    assert not cluster.alive()
    phases = [(p.process.name if p.process else None, p.phase) for p in seen]
    assert phases[-1] == (None, "serving") and ("prefill-1", "starting") in phases
    cluster.stop()


@pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing()))
def test_a_pegaflow_server_comes_before_the_workers_and_goes_with_them(fake, tmp_path, monkeypatch):
    """The real server, on a stand-in for the CUDA driver."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PACKAGE_ROOT, *host_server.package_path()]))
    commands = {**fake, "pegaflow": (host_server.__file__,)}
    options = ["--devices", "0", "--pool-size", "16mb"]
    with Cluster("m", commands=commands, pegaflow=options, log_dir=tmp_path, timeout_s=60) as cluster:
        assert [p.role for p in cluster.processes] == ["pegaflow", "prefill", "decode", "router"]
        server = cluster.processes[0]
        assert server.ready_s < min(p.ready_s for p in cluster.processes[1:])
        endpoint = option_value(server.command, "--addr")
        for url in (*cluster.prefill_urls, *cluster.decode_urls):
            args = json.loads(http(url + "/generate", {})[1])["args"]
            assert "--enable-pegaflow" in args and option_value(args, "--pegaflow-endpoint") == endpoint
        assert json.loads(http(server.url + "/instances")[1]) == {"instances": []}
    assert server.returncode() is not None
    with pytest.raises(PdRadixError, match="--addr is set by"):
        Cluster("m", pegaflow=["--addr", "0.0.0.0:1"]).plan()


def test_aggregated_is_one_engine_without_router(fake, tmp_path):
    with Cluster("m", aggregated=True, commands=fake, aggregated_args=["--z"], log_dir=tmp_path) as cluster:
        answer = json.loads(http(cluster.router_url + "/generate", {})[1])
        assert answer["role"] == "engine" and answer["args"][-1] == "--z"
        assert [p.role for p in cluster.processes] == ["engine"]


@pytest.mark.parametrize("gateway", GATEWAYS.values(), ids=str)
def test_several_decode_workers_are_chosen_as_suits_the_gateway(fake, tmp_path, gateway):
    routers = {
        "one": ([0], []),
        "two": ([0, 1], []),
        "chosen": ([0, 1], ["--decode-policy", "random"]),
    }
    with Cluster("m", decode=2, commands=fake, gateway=gateway, log_dir=tmp_path, routers=routers) as cluster:
        args = {name: json.loads(http(url + "/generate", {})[1])["args"] for name, url in cluster.router_urls.items()}
    own = option_value(gateway.several_decode, "--decode-policy")
    assert own == {SMG: "cache_aware", SGLANG_ROUTER: "manual"}[gateway]
    assert {name: option_value(of, "--decode-policy") for name, of in args.items()} == {
        "one": None,
        "two": own,
        "chosen": "random",
    }


def test_each_router_has_its_own_decode_workers(fake, tmp_path):
    routers = {"off": ([0], []), "on": ([1], ["--policy", "random"])}
    with Cluster("m", decode=2, commands=fake, log_dir=tmp_path, routers=routers) as cluster:
        assert list(cluster.router_urls) == ["off", "on"] and cluster.router_url == cluster.router_urls["off"]
        for i, url in enumerate(cluster.router_urls.values()):
            args = json.loads(http(url + "/generate", {})[1])["args"]
            assert cluster.prefill_urls[0] in args
            assert cluster.decode_urls[i] in args and cluster.decode_urls[1 - i] not in args
        assert args[-2:] == ["--policy", "random"]
    with pytest.raises(PdRadixError, match="--host is set by"):
        Cluster("m", routers={"off": ([0], ["--host", "::1"])})
    with pytest.raises(PdRadixError, match=r"routers: off routes to \[2\], and decode workers are 0 to 1"):
        Cluster("m", decode=2, routers={"off": ([2], [])})


def test_paused_servers_do_nothing_until_they_are_resumed_and_end_with_the_rest(fake, tmp_path):
    def states(process):
        group = process_group.members(process.pid)
        return {(Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] for pid in group}

    with Cluster("m", decode=2, commands=fake, log_dir=tmp_path) as cluster:
        idle, busy = (p for p in cluster.processes if p.role == "decode")
        cluster.pause(["decode-0"])
        until(lambda: states(idle) == {"T"}, "not paused")
        assert "T" not in states(busy) and cluster.alive()
        assert http(busy.url + "/health")[0] == 200
        cluster.resume()
        until(lambda: "T" not in states(idle), "not resumed")
        assert http(idle.url + "/health")[0] == 200
        cluster.pause(["decode-0"])
    assert not cluster.alive()


def test_a_killed_server_can_be_started_again(fake, tmp_path):
    with Cluster("m", decode=2, commands=fake, log_dir=tmp_path) as cluster:
        gone, other = (p for p in cluster.processes if p.role == "decode")
        cluster.pause(["decode-0"])
        cluster.kill("decode-0")
        assert cluster.dead() is gone and gone.returncode() == -signal.SIGKILL
        assert not process_group.members(gone.pid) and http(gone.url + "/health")[0] == 0
        assert http(other.url + "/health")[0] == 200
        first = gone.pid
        # Its number may be a stranger's from now on.
        assert first not in cluster._family._groups and other.pid in cluster._family._groups
        cluster.restart("decode-0")
        assert cluster.alive() and gone.pid != first and http(gone.url + "/health")[0] == 200
    assert not process_group.members(gone.pid)


def test_a_restart_ends_while_the_worker_does_not_answer(fake, tmp_path):
    """It hangs when it is ready: whoever waits heard of nothing for 10 s, and then it counted as started."""

    def wait() -> None:
        if "asked to freeze" in (tmp_path / "decode-0.log").read_text():
            raise TimeoutError("given up")

    with Cluster("m", commands=fake, log_dir=tmp_path) as cluster:
        worker = hang_when_ready(cluster)
        cluster._on_wait = wait
        with pytest.raises(TimeoutError, match="given up"):
            cluster.restart("decode-0")
    assert not process_group.members(worker.pid)


def test_a_restart_says_what_takes_longer_than_it_may(fake, tmp_path, monkeypatch):
    with Cluster("m", commands=fake, log_dir=tmp_path) as cluster:
        log = hang_when_ready(cluster).log_path
        # The time is up when it hangs.
        monkeypatch.setattr(Startup, "_left", lambda self: 0.0 if "asked to freeze" in log.read_text() else 60.0)
        with pytest.raises(PdRadixError, match="not ready after 600 s: decode-0 does not answer /freeze_gc"):
            cluster.restart("decode-0")


def hang_when_ready(cluster):
    """Kill the decode worker; started again, it is ready and then does not answer."""
    worker = next(process for process in cluster.processes if process.role == "decode")
    worker.env["FAKE_DECODE"] = "hangs"
    cluster.kill(worker.name)
    return worker


def test_death_at_start_is_noticed_at_once_with_reason_and_log(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DECODE", "dies")
    monkeypatch.setenv("FAKE_PREFILL", "never")
    started = time.monotonic()
    cluster = Cluster("m", commands=fake, log_dir=tmp_path / "logs")
    with pytest.raises(PdRadixError) as caught:
        cluster.start()
    # Not when the time is up that the other one has to become ready.
    assert time.monotonic() - started < 60
    first, *rest = str(caught.value).splitlines()
    assert first == "decode-0 exited with code 3: ValueError: the page size must be a power of two"
    assert str(tmp_path / "logs" / "decode-0.log") in rest[0] and "Traceback" in rest[1]
    assert not cluster.alive()


def test_time_limit_names_who_is_not_ready(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PREFILL", "never")
    with pytest.raises(PdRadixError, match=r"not ready after 4 s: prefill-0 is starting. Logs are in [^;]*$"):
        Cluster("m", commands=fake, log_dir=tmp_path, timeout_s=4).start()
    # That command alone has the option.
    _, err = start_up(fake, tmp_path, "--timeout", "1").communicate(timeout=60)
    assert f"Logs are in {tmp_path / 'logs'}; give more time with --timeout if they show progress\n" in err


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10])
def test_a_start_may_take_for_ever(fake, tmp_path, timeout_s):
    with Cluster("m", commands=fake, log_dir=tmp_path, timeout_s=timeout_s) as cluster:
        assert cluster.alive()


def test_refused_request_is_not_repeated_until_the_time_limit(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_ROUTER", "refuses")
    with pytest.raises(PdRadixError, match="HTTP 400.*no such model"):
        Cluster("m", commands=fake, log_dir=tmp_path, timeout_s=60).start()


def test_process_that_ignores_sigterm_is_killed(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DECODE", "stubborn")
    cluster = Cluster("m", commands=fake, log_dir=tmp_path)
    cluster.start()
    decode = next(p for p in cluster.processes if p.role == "decode")
    cluster.stop(grace_s=0.5)
    assert decode.returncode() == -signal.SIGKILL and not process_group.members(decode.pid)


def test_an_interrupt_leaves_no_server_that_nobody_knows(fake, tmp_path, monkeypatch):
    """`demo`, `bench`, `verify` have no handlers of their own: it comes when a process is there and not noted."""
    popen, started = subprocess.Popen, []

    def interrupted(*args, **options):
        started.append(popen(*args, **options))
        if len(started) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    # A shell has what it starts in the background ignore it.
    at_first = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    cluster = Cluster("org/model", commands=fake, log_dir=tmp_path / "logs")
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.start()
        # The watchdog, and two servers.
        assert len(started) == 3 and all(one.poll() is not None for one in started)
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    finally:
        signal.signal(signal.SIGINT, at_first)
