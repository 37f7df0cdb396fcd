"""`pd-radix join`: a worker that is ready is told to the gateway, which then uses it."""

from __future__ import annotations

import time
from threading import Timer

import pytest
from test_top import Worker, workers

from sglang_pd_radix.tools import cli, join
from sglang_pd_radix.tools.operate import reading


@pytest.fixture
def found(monkeypatch):
    """A gateway that records in ``asked`` what it is to take in, and does, and a worker."""
    monkeypatch.setattr(join, "LOOK_S", 0.02)
    with workers(2) as (gateway, worker):
        listed: list[dict] = []
        gateway.answers["/workers"], gateway.asked = {"workers": listed}, []

        def take_in(path: str, body: dict) -> int:
            gateway.asked.append((path, body))
            listed.append({"id": "x", "is_healthy": False, "status": "pending", **body})
            Timer(0.1, listed[0].update, [{"is_healthy": True, "status": "ready"}]).start()
            return 202

        gateway.on_post = take_in
        worker.answers["/health"] = gateway.answers["/health"] = "ok"
        yield gateway, worker


def says(worker: Worker, mode: str, **more) -> None:
    worker.answers["/server_info"] = {"disaggregation_mode": mode, **more}


def joined(gateway: Worker, worker: Worker, *more: str) -> int:
    return cli.main(["join", worker.address, "--gateway", gateway.address, "--timeout", "60", *more])


@pytest.mark.parametrize("mode, more", [("decode", {}), ("prefill", {"bootstrap_port": 9000})])
def test_a_gateway_is_told_what_it_has_to_know(found, capsys, mode, more):
    gateway, worker = found
    # A decode worker has the engine's default of the option, which is nobody's port.
    says(worker, mode, disaggregation_bootstrap_port=9000)
    posted: list[str] = []
    worker.on_post = lambda path, body: posted.append(path) or 200
    assert joined(gateway, worker) == 0
    told = {"url": f"http://{worker.address}", "worker_type": mode, **more}
    assert gateway.asked == [("/workers", told)]
    # Before anybody waits for it, its collections are to leave out what it has loaded.
    assert posted == ["/freeze_gc"]
    # What it uses already it is not told again.
    worker.on_post = lambda path, body: 401
    assert joined(gateway, worker) == 0
    assert "ready, a" in (said := capsys.readouterr().err) and "but garbage collections will pause it" in said
    assert len(gateway.asked) == 1


def test_a_gateway_is_given_the_key_of_a_worker(found, monkeypatch):
    """Its own it gives to those alone that it was started with."""
    gateway, worker = found
    says(worker, "decode")
    monkeypatch.setenv("SGLANG_PD_RADIX_API_KEY", "of the workers")
    assert joined(gateway, worker) == 0
    ((_, told),) = gateway.asked
    assert told == {"url": f"http://{worker.address}", "worker_type": "decode", "api_key": "of the workers"}


def test_where_a_key_is_missing_the_error_says_how_to_give_it(found, monkeypatch, capsys):
    gateway, worker = found
    says(worker, "decode")
    monkeypatch.delenv("SGLANG_PD_RADIX_API_KEY", raising=False)
    worker.key = "of the workers"
    assert joined(gateway, worker) == 1
    assert "HTTP 401 (it asks for a key, which SGLANG_PD_RADIX_API_KEY has to have)" in capsys.readouterr().err
    worker.key = None
    gateway.on_post = lambda path, body: 401
    assert joined(gateway, worker) == 1
    assert "which SGLANG_PD_RADIX_API_KEY has to have" in capsys.readouterr().err
    gateway.key = worker.key = "of the workers"
    for command in (["top", "--json", worker.address], ["trace", "x", worker.address]):
        assert cli.main(command) == 1
        said = capsys.readouterr()
        assert "which SGLANG_PD_RADIX_API_KEY has to have" in said.out + said.err
    assert cli.main(["top", "--json", "--gateway", gateway.address]) == 1
    assert "which SGLANG_PD_RADIX_API_KEY has to have" in capsys.readouterr().err


def test_a_worker_that_starts_is_waited_for(found, capsys):
    gateway, worker = found
    del worker.answers["/health"]
    says(worker, "decode")
    assert joined(gateway, worker, "--timeout", "0.2") == 1
    assert "is not ready" in capsys.readouterr().err and not gateway.asked
    Timer(0.3, worker.answers.__setitem__, ("/health", "ok")).start()
    assert joined(gateway, worker) == 0


def test_one_that_the_gateway_knows_and_does_not_use_yet(found):
    gateway, worker = found
    says(worker, "decode")
    known = {"id": "x", "url": f"http://{worker.address}", "worker_type": "decode", "is_healthy": False}
    gateway.answers["/workers"]["workers"].append(known)
    gateway.on_post = lambda path, body: 409
    Timer(0.2, known.update, [{"is_healthy": True}]).start()
    assert joined(gateway, worker) == 0


@pytest.mark.parametrize("mode", ["null", None])
def test_what_is_no_worker_of_a_pair(found, capsys, mode):
    gateway, worker = found
    says(worker, mode) if mode else worker.answers.pop("/server_info", None)
    assert joined(gateway, worker) == 1
    assert "is no prefill or decode worker" in capsys.readouterr().err and not gateway.asked


def test_a_gateway_that_does_not(found, capsys):
    gateway, worker = found
    says(worker, "decode")
    del gateway.answers["/health"]
    assert joined(gateway, worker, "--timeout", "0.2") == 1
    assert "does not answer" in capsys.readouterr().err
    gateway.answers["/health"] = "ok"
    gateway.on_post = lambda path, body: 500
    assert joined(gateway, worker) == 1
    assert "does not take" in capsys.readouterr().err
    gateway.on_post = lambda path, body: 202
    assert joined(gateway, worker, "--timeout", "0.2") == 1
    assert "does it reach this address" in capsys.readouterr().err
    assert cli.main(["join", worker.address, "--gateway", gateway.address, "--timeout", "0"]) == 1


def test_one_that_is_late_once_is_asked_again(found, monkeypatch):
    gateway, worker = found
    monkeypatch.setattr(join, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(reading, "TIMEOUT_S", 0.2)
    info, listed = {"disaggregation_mode": "decode"}, gateway.answers["/workers"]
    for one, path, answer in ((worker, "/server_info", info), (gateway, "/workers", listed)):
        late = [1.0]
        one.answers[path] = lambda late=late, answer=answer: time.sleep(late.pop() if late else 0) or answer
    assert joined(gateway, worker) == 0


def test_a_worker_that_never_tells_what_it_is(found, monkeypatch, capsys):
    gateway, worker = found
    monkeypatch.setattr(join, "TIMEOUT_S", 0.1)
    worker.answers["/server_info"] = lambda: time.sleep(0.5)
    assert joined(gateway, worker, "--timeout", "1") == 1
    assert "does not answer, though its health check did" in capsys.readouterr().err
    says(worker, "prefill")
    monkeypatch.setattr(join, "TIMEOUT_S", 5)
    assert joined(gateway, worker) == 1
    assert "does not report its --disaggregation-bootstrap-port" in capsys.readouterr().err and not gateway.asked


def test_a_gateway_that_cannot_be_one_is_told_before_anything_is_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(join, "wait_ready", lambda url, deadline: pytest.fail("nothing may be waited for"))
    assert cli.main(["join", "127.0.0.1:1", "--gateway", "10.0.0.3:999999"]) == 1
    assert "10.0.0.3:999999: give HOST:PORT" in capsys.readouterr().err
