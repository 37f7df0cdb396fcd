"""Trees that save to a real PegaFlow server and load from it; only the CUDA driver under the server is a stand-in."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import host_server
import pytest
from kv_listener import Listener, names_in
from waiting import until

pytestmark = pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing()))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    server = host_server.HostServer(tmp_path_factory.mktemp("pegaflow")).start()
    yield server
    server.kill()


@pytest.fixture
def server(tmp_path):
    """One that the test may kill."""
    server = host_server.HostServer(tmp_path).start()
    yield server
    server.kill()


@pytest.fixture
def engine(monkeypatch):
    """Makes engines, and looks at each of them at the end."""
    import small_engine
    from sglang.srt.mem_cache.pegaflow import prefetches
    from sglang.srt.mem_cache.pegaflow import session as pegaflow_session
    from sglang.srt.mem_cache.pegaflow import tree as pegaflow_tree

    monkeypatch.setattr(pegaflow_session, "PROBE_S", 0.2)
    monkeypatch.setattr(prefetches, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(pegaflow_tree, "DRAIN_ROUNDS", 3000)
    engines = []

    def make(*args, namespace=None, **options):
        namespace = namespace or f"test-{random.random()}"
        engines.append(small_engine.SmallEngine(*args, namespace=namespace, **options))
        return engines[-1]

    yield make
    for made in engines:
        made.audit()
        made.close()


def prompt(length, seed=0):
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_saved_evicted_loaded(shared, engine, page, mla):
    small = engine(shared, page=page, mla=mla)
    tokens = prompt(300)
    assert small.serve(tokens) == (0, 0)
    small.flush()
    held = 299 // page * page
    assert small.serve(tokens) == (held, held)
    # On the device now.
    assert small.serve(tokens) == (0, held)


def test_two_engines_share_one_pool(shared, engine):
    one, two = engine(shared, namespace="both"), engine(shared, namespace="both")
    other = engine(shared, namespace="other")
    tokens = prompt(200)
    one.serve(tokens)
    one.settle()
    assert two.serve(tokens) == (192, 192)
    assert other.serve(tokens) == (0, 0)


def test_keys_are_kept_apart(shared, engine):
    small = engine(shared)
    tokens = prompt(200)
    small.serve(tokens, "salt")
    small.flush()
    assert small.serve(tokens) == (0, 0)
    assert small.serve(tokens, "other salt") == (0, 0)
    assert small.serve(tokens, "salt")[0] == 192


def test_only_what_the_tree_lacks_is_loaded(shared, engine):
    """Of a prompt that is on the device up to a point; the answer before that point is not asked for again."""
    one, two = engine(shared, namespace="parts"), engine(shared, namespace="parts")
    tokens = prompt(320)
    one.serve(tokens)
    one.settle()
    two.serve(tokens[:100])
    assert two.serve(tokens) == (304 - 96, 304)
    # What follows the end of a node, and what follows its middle.
    branch = tokens[:64] + prompt(200, seed=2)
    one.serve(branch)
    one.settle()
    assert two.serve(branch) == (256 - 64, 256)


def test_pages_computed_meanwhile_are_freed(shared, engine):
    """Another request computes what is being loaded: one copy stays."""
    small = engine(shared)
    tokens = prompt(300)
    small.serve(tokens)
    small.flush()
    small.ask("slow", tokens)
    until(lambda: small.tree.advance() or small.tree.prefetches.loading_tokens, "a load")
    small.run(tokens)
    small.wait("slow")
    assert small.run(tokens) == 288


def test_pool_pressure(shared, engine):
    """Three times as many prefixes as fit, in turns; each is right, and none is recomputed while the server has it."""
    small = engine(shared, size=1024)
    prompts = [prompt(500, seed) for seed in range(6)]
    for tokens in prompts:
        small.serve(tokens)
        small.settle()
    for _ in range(2):
        for tokens in prompts:
            assert small.serve(tokens)[1] == 496


@pytest.mark.parametrize("page", [1, 16])
def test_by_kv_events_exactly_the_tree_is_known(shared, engine, page):
    """Whatever is saved, evicted, loaded and split meanwhile; extra_keys apart."""
    small, listener = engine(shared, size=1024, page=page), Listener()
    small.tree.enable_kv_cache_events = True
    prompts = [(prompt(300, seed), key) for seed in range(4) for key in (None, "salt")]
    prompts += [(tokens[:100] + prompt(150, seed=9), key) for tokens, key in prompts[:2]]
    for n in random.Random(page).choices(range(len(prompts)), k=30):
        small.serve(*prompts[n])
        if n == 3:
            small.flush()
        listener.hear(small.tree.take_events())
        held = names_in(small.tree)
        assert set(listener.parents) == set(held) and len(held) == len(set(held)) > 0 or n == 3
    small.flush()
    listener.hear(small.tree.take_events())
    assert not listener.parents


def test_more_waits_than_fits(shared, engine, monkeypatch):
    """Many requests at once: what has been loaded for one is not thrown out for the next, and none waits for ever."""
    from sglang.srt.mem_cache.pegaflow import prefetches
    from small_engine import NoRoom

    # However busy the host is.
    monkeypatch.setattr(prefetches, "TIMEOUT_S", 30.0)
    small = engine(shared, size=1024)
    prompts = {f"r{seed}": prompt(400, seed) for seed in range(8)}
    for tokens in prompts.values():
        small.serve(tokens)
        small.settle()
    small.flush()
    for rid, tokens in prompts.items():
        small.ask(rid, tokens)
    waiting, loaded = dict(prompts), 0
    end = time.monotonic() + 60
    while waiting and time.monotonic() < end:
        small.tree.advance()
        for rid in list(waiting):
            # The engine's turn through its queue.
            if small.tree.check_prefetch_progress(rid):
                loaded += small.tree.pop_prefetch_loaded_tokens(rid) > 0
                try:
                    small.run(waiting[rid])
                except NoRoom:
                    break
                del waiting[rid]
                break
    assert not waiting and loaded == 8


def test_a_prompt_larger_than_the_room(shared, engine):
    """What cannot be given pages is a miss."""
    big, small = engine(shared, size=2048, namespace="room"), engine(shared, size=256, namespace="room")
    tokens = prompt(1500)
    big.serve(tokens)
    big.settle()
    small.ask("r", tokens)
    assert small.wait("r") == 0


def leases(server):
    """Whether the server still holds pages that it was told to forget: those of leases."""
    server.forget()
    return server.metric("pegaflow_pool_used_bytes")


def test_abort(server, engine):
    """Before the answer, between answer and load, during the load: no lease and no page is kept."""
    small = engine(server)
    tokens = prompt(300)
    small.serve(tokens)
    for steps in (0, 1, 2):
        small.flush()
        small.ask("gone", tokens)
        for _ in range(steps):
            time.sleep(0.05)
            small.tree.advance()
        small.tree.release_aborted_request("gone")
        assert small.tree.check_prefetch_progress("gone")
        assert small.tree.drain()
        small.audit()
    assert server.metric("pegaflow_pool_used_bytes") > 0
    until(lambda: leases(server) == 0, "the end of all leases")


def test_a_lease_is_seen(server, engine):
    """That `leases` would see one."""
    small = engine(server)
    tokens = prompt(300)
    small.serve(tokens)
    small.flush()
    small.tree.prefetches._is_its_turn = lambda tokens, asked: False
    small.ask("held", tokens)
    until(lambda: small.tree.advance() or small.tree.prefetches.open[0].stage.value == "found", "what is found")
    held = leases(server)
    assert held > 0
    small.tree.release_aborted_request("held")
    assert small.tree.drain()
    until(lambda: leases(server) == 0, "the end of all leases")


def warnings_in(caplog):
    return [
        record.message for record in caplog.records if record.levelname == "WARNING" and "PegaFlow" in record.message
    ]


def test_server_killed_between_and_back(server, engine, caplog):
    small = engine(server)
    tokens = prompt(300)
    small.serve(tokens)
    small.flush()
    server.kill()
    assert small.serve(tokens) == (0, 0)
    assert small.serve(prompt(300, seed=2)) == (0, 0)
    assert small.tree.drain()
    assert len(warnings_in(caplog)) == 1 and not small.session.up
    server.start()
    until(lambda: small.session.up, "the session")
    assert server.instances() == [small.session.connection.instance_id]
    # What could not be saved is saved when it is met again.
    small.serve(tokens)
    assert small.tree.drain()
    small.flush()
    assert small.serve(tokens) == (288, 288)
    assert len(warnings_in(caplog)) == 1


def test_server_restarted_unnoticed(server, engine, caplog, monkeypatch):
    """Gone and back between two looks: the next call finds itself unknown, and registers."""
    from sglang.srt.mem_cache.pegaflow import session as pegaflow_session

    monkeypatch.setattr(pegaflow_session, "PROBE_S", 1000.0)
    small = engine(server)
    server.kill()
    server.start()
    tokens = prompt(300)
    small.run(tokens)
    assert small.tree.drain()
    small.flush()
    assert small.serve(tokens) == (288, 288)
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("how", ["started anew", "made room"])
def test_a_hot_prefix_that_the_server_has_lost_is_saved_again(server, engine, how):
    """It is in the tree all the time, so nothing of it is computed; what follows it is found only with it."""
    one, two = engine(server, namespace="lost"), engine(server, namespace="lost")
    stem = prompt(160)
    one.serve(stem + prompt(40, seed=1))
    one.settle()
    if how == "started anew":
        server.kill()
        server.start()
        for small in (one, two):
            # Each finds out by itself.
            small.serve(prompt(40, seed=9))
            until(lambda small=small: small.session.up, "the session")
    else:
        server.forget()
        assert server.metric("pegaflow_pool_used_bytes") == 0
    for seed in (2, 3):
        one.serve(stem + prompt(40, seed=seed))
        one.settle()
    assert two.serve(stem + prompt(40, seed=3)) == (192, 192)
    # Once, not with each request.
    before = one.session.counters.saved
    one.serve(stem + prompt(40, seed=3))
    one.settle()
    assert one.session.counters.saved == before


@pytest.mark.parametrize("end", ["killed", "killed and back", "stopped"])
def test_server_ends_during_a_load(server, engine, caplog, end):
    """The request becomes a miss; its pages are given to nobody until the server cannot write to them."""
    small = engine(server)
    tokens = prompt(300)
    small.run(tokens)
    small.settle()
    small.flush()
    server.hold()
    small.ask("r", tokens)
    until(lambda: small.tree.advance() or server.holds(), "the server writes to its pages")
    if end == "stopped":
        server.signal(signal.SIGSTOP)
    else:
        server.kill()
        server.let_go()
        if end == "killed and back":
            server.start()
    start = time.monotonic()
    assert small.wait("r", 30) == 0
    assert small.tree.prefetches.loading_tokens == 288 and small.tree.protected_size() == 288
    assert small.run(tokens) == 0
    assert len(warnings_in(caplog)) == 1
    if end == "stopped":
        assert time.monotonic() - start > 0.5
        time.sleep(0.5)
        small.tree.advance()
        assert small.tree.prefetches.loading_tokens == 288
        server.let_go()
        server.signal(signal.SIGCONT)
    assert small.tree.drain()
    assert small.tree.prefetches.loading_tokens == 0
    small.flush()


def test_server_killed_during_a_save(server, engine, caplog):
    small = engine(server)
    tokens = prompt(300)
    server.hold()
    small.run(tokens)
    small.tree.advance()
    until(server.holds, "the server reads its pages")
    assert small.tree.busy and small.tree.protected_size() == 128
    small.tree.advance()
    assert small.tree.protected_size() == 128, "held until the server is done, or gone"
    server.kill()
    assert small.tree.drain()
    assert small.tree.protected_size() == 0
    assert len(warnings_in(caplog)) == 1


def test_slots_are_held_while_they_are_saved(server, engine):
    """What is saved is what was computed, however soon its slots are wanted for something else."""
    server.kill()
    server.copy_us = 5_000
    server.start()
    small = engine(server, size=4096)
    first = prompt(300)
    small.run(first)
    small.tree.advance()
    # Nothing of it can go while it is saved; when it is saved, all of it does.
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    small.tree.evict(EvictParams(num_tokens=4096))
    assert small.tree.protected_size() == 288
    assert small.tree.drain()
    small.run(prompt(4000, seed=2))
    assert small.tree.drain()
    small.flush()
    assert small.serve(first) == (288, 288)


def test_more_to_save_than_may_be_held(shared, engine):
    """An eighth of the pool at a time; the rest in its turn, also of nodes that are split meanwhile."""
    small = engine(shared, size=2048)
    stem = prompt(200)
    prompts = [stem + prompt(150, seed) for seed in range(6)]
    for tokens in prompts:
        small.run(tokens)
    small.run(stem[:100] + prompt(100, 9))
    small.tree.advance()
    assert 0 < small.tree.protected_size() <= 336 and small.tree.saves.to_come
    assert small.tree.drain() and not small.tree.saves.to_come
    small.flush()
    for tokens in prompts:
        assert small.serve(tokens)[1] == 336


def test_a_weight_update_ends_it(shared, engine, caplog):
    """What is under way ends; nothing of other weights is saved, and nothing of these is loaded."""
    small = engine(shared, size=8192)
    tokens, more = prompt(300), prompt(300, seed=2)
    small.serve(tokens)
    small.run(more)
    small.tree.advance()
    small.ask("r", tokens[:200] + more)
    small.tree.stop()
    small.wait("r")
    small.flush()
    saved = small.session.counters.saved
    assert small.serve(tokens) == (0, 0)
    small.serve(prompt(300, seed=3))
    time.sleep(0.5)
    assert small.tree.drain() and not small.session.up
    assert small.session.counters.saved == saved == 36
    assert [line.split(":")[0] for line in warnings_in(caplog)] == ["The weights were updated"]


@pytest.mark.thorough  # It imports the engine once more.
@pytest.mark.timeout(300)
def test_an_engine_that_crashes_leaves_nothing(server, tmp_path):
    """Session: the server sees its process end, without a word."""
    import subprocess

    code = f"""
import sys, os, time
sys.path.insert(0, {str(Path(host_server.__file__).parent)!r})
import small_engine
class Server: endpoint = {server.endpoint!r}
small = small_engine.SmallEngine(Server)
small.serve(list(range(300)))
print("ready", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    assert len(server.instances()) == 1 and server.mappings() == 4
    child.kill()
    child.wait()
    until(lambda: not server.instances() and not server.mappings(), "the end of all of it")
    assert leases(server) == 0


# ---- options ----

FLAG = "--enable-pegaflow"
PREFILL = ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"]
DECODE = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"]
DECODE_RADIX = [*DECODE, "--disaggregation-decode-enable-radix-cache"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from sglang_pd_radix.tools.make_model import make_model

    return str(make_model(tmp_path_factory.mktemp("model") / "m"))


@pytest.fixture
def check(model, monkeypatch):
    """Check options as a server does when it starts, on a host whose memory the server can map."""
    from sglang.srt.mem_cache.pegaflow import memory as pegaflow_memory
    from sglang.srt.server_args import prepare_server_args

    monkeypatch.setattr(pegaflow_memory, "check_device", lambda device: None)

    def check(*options, model=model):
        args = prepare_server_args(["--model-path", model, "--device", "cpu", FLAG, *options])
        args.check_server_args()
        return args

    return check


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--disable-radix-cache"], "--disable-radix-cache"),
        (["--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
        (["--enable-lmcache"], "--enable-lmcache"),
        (["--enable-streaming-session"], "--enable-streaming-session"),
        (["--enable-memory-saver"], "--enable-memory-saver"),
        (["--dp-size", "2"], "--data-parallel-size"),
        (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], "--enable-dp-attention"),
        (["--pp-size", "2"], "--pipeline-parallel-size"),
        (["--is-embedding"], "--is-embedding"),
        (DECODE, "without --disaggregation-decode-enable-radix-cache"),
        (["--pegaflow-endpoint", "10.0.0.1:50055"], "--pegaflow-allow-non-loopback"),
        (["--pegaflow-endpoint", "0.0.0.0:50055"], "--pegaflow-allow-non-loopback"),
        (["--pegaflow-endpoint", "here"], "HOST:PORT"),
        (["--pegaflow-endpoint", "http://[::"], "HOST:PORT"),
        (["--pegaflow-endpoint", "127.0.0.1:1"], "no PegaFlow server answers at http://127.0.0.1:1"),
        (["--pegaflow-endpoint", "127.0.0.1:1", *DECODE_RADIX], "no PegaFlow server answers"),
        (["--pegaflow-endpoint", "http://127.0.0.1.example.net:50055"], "--pegaflow-allow-non-loopback"),
    ],
)
def test_refused_before_the_model_is_loaded(check, options, named):
    with pytest.raises(ValueError) as refused:
        check(*options)
    assert "pegaflow" in str(refused.value).lower() and named in str(refused.value)


def test_an_environment_switch_is_refused_too(check, monkeypatch):
    monkeypatch.setenv("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "1")
    with pytest.raises(ValueError, match="SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"):
        check()


def test_a_host_whose_memory_cannot_be_mapped_is_refused(check, monkeypatch):
    from sglang.srt.mem_cache.pegaflow import memory as pegaflow_memory

    monkeypatch.undo()
    with pytest.raises(ValueError, match="--device cuda"):
        pegaflow_memory.check_device("cpu")


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("role", [[], PREFILL, DECODE_RADIX], ids=["aggregated", "prefill", "decode"])
def test_a_server_of_the_right_version_is_taken(check, shared, role, ranks):
    args = check("--pegaflow-endpoint", shared.endpoint, "--tp-size", ranks, *role)
    assert args.enable_pegaflow and not args.disable_radix_cache


def test_other_versions_are_refused(check, shared, monkeypatch):
    from sglang.srt.mem_cache.pegaflow import checks as server

    monkeypatch.setattr(server.pegaflow_host, "installed_version", lambda: "0.24.6")
    with pytest.raises(ValueError, match="needs pegaflow-llm==0.25.1, and 0.24.6 is installed"):
        check("--pegaflow-endpoint", shared.endpoint)
    monkeypatch.undo()


def test_a_server_of_another_version_is_refused(shared, monkeypatch):
    """It turns every registration down, with this message (seen with a client 0.24.6)."""
    import pegaflow
    from sglang.srt.mem_cache.pegaflow import checks as server

    class OtherClient:
        def __init__(self, url):
            pass

        def health(self):
            return True, ""

        def register_context_batch(self, *args):
            raise pegaflow.PegaFlowError("PegaFlow version mismatch: client=0.25.1 server=0.26.0")

    monkeypatch.setattr(pegaflow, "EngineRpcClient", OtherClient, raising=False)
    with pytest.raises(ValueError, match="server=0.26.0.*Both must be 0.25.1"):
        server.check_server(shared.endpoint)


def test_prefill_and_decode_of_one_model_share_by_default(model):
    from sglang.srt.mem_cache.kv_namespace import kv_namespace
    from sglang.srt.server_args import prepare_server_args

    def name_of(*options):
        return kv_namespace(prepare_server_args(["--model-path", model, "--device", "cpu", *options]))

    assert name_of() == name_of(*PREFILL) == name_of(*DECODE_RADIX)
    others = [["--dtype", "float32"], ["--kv-cache-dtype", "fp8_e5m2"], ["--weight-version", "2"]]
    names = {name_of(*more) for more in ([], *others, ["--kv-namespace", "mine"])}
    assert len(names) == 5


def test_an_engine_without_the_flag_has_nothing_of_it(model):
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(["--model-path", model, "--device", "cpu"])
    args.check_server_args()
    assert not args.enable_pegaflow
