"""The storage backends themselves: their options, what is not there at the start, and how each of them fails."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import mooncake_master
import psutil
import pytest
import storage_kinds
import torch
from decode_worker import DecodeWorker
from mooncake_master import HOST
from sglang.srt import server_args
from sglang.srt.mem_cache import cache_support, kv_cache_builder
from sglang.srt.mem_cache.cache_support import FLAG
from sglang.srt.mem_cache.host_tier import storage_mooncake, storage_nixl, storage_threads, tier
from sglang.srt.mem_cache.host_tier.checks import check_free, check_rank
from sglang.srt.mem_cache.host_tier.storage_backends import BACKENDS
from sglang.srt.mem_cache.host_tier.storage_files import PageFiles
from sglang.srt.mem_cache.host_tier.storage_mooncake import PagesInMooncake
from sglang.srt.mem_cache.host_tier.storage_nixl import PagesThroughNixl
from sglang.srt.mem_cache.host_tier.storage_options import options_of, read_options, taken_of_rank
from sglang.srt.mem_cache.host_tier.storage_tree import StoredHostTree
from sglang.srt.mem_cache.host_tier.tree import HostTierRadixCache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.observability import thread_time
from storage_kinds import opened
from storage_world import PATIENT, StorageWorld, names_of
from test_traps import tokens

from sglang_pd_radix.tools.make_model import make_model


def page_of(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# ---- any of them ----


def test_what_is_not_refused_can_be_opened():
    assert tuple(BACKENDS) == cache_support.STORAGES


def test_pages_come_back_under_their_names_alone(kind, tmp_path):
    """Of any length; and what is cleared is one rank's."""
    ranks = [opened(kind, tmp_path / name, 5001) for name in ("rank", "rank2")]
    pages = {f"{i:x}": page_of(5001, i) for i in range(3)}
    for name, page in pages.items():
        assert not ranks[0].exists(name) and ranks[0].set(name, page) and ranks[0].exists(name)
    buffer = torch.zeros(5001, dtype=torch.uint8)
    for name, page in pages.items():
        assert ranks[0].get(name, buffer) is buffer and torch.equal(buffer, page)
        assert not ranks[1].exists(name) and ranks[1].get(name, buffer) is None
    ranks[1].set("0", pages["1"])
    ranks[0].clear()
    assert [ranks[0].exists(name) for name in pages] == [False] * 3 and ranks[0].get("0", buffer) is None
    assert ranks[1].get("0", buffer) is buffer and torch.equal(buffer, pages["1"])
    assert not ranks[0].corrupt and not ranks[1].corrupt


# ---- nixl ----


@pytest.mark.parametrize("mode", ["use_aio", "use_uring", "use_posix_aio"])
def test_nixl_and_files_have_one_format(tmp_path, mode):
    through, files = PagesThroughNixl(tmp_path, 5001, {mode: "true"}), PageFiles(tmp_path, 5001)
    buffer = torch.zeros(5001, dtype=torch.uint8)
    for writes, reads in ((through, files), (files, through)):
        writes.set("0", page_of(5001))
        assert reads.get("0", buffer) is buffer and torch.equal(buffer, page_of(5001))
        (tmp_path / "0.bin").unlink()
        buffer.zero_()


def test_a_nixl_write_that_ends_short_leaves_nothing(tmp_path):
    """On a disk that is full, here for a limit of the process; Python does not heed its signal."""
    files, page = PagesThroughNixl(tmp_path, 1 << 16, {}), page_of(1 << 16)
    files.set("0", page)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
    try:
        with pytest.raises(OSError, match="NIXL ends a WRITE with"):
            files.set("1", page)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.bin", "id", "parts"]
    assert files.set("1", page) and files.get("1", page) is page


def test_a_nixl_read_that_fails_costs_its_page(tmp_path, monkeypatch):
    files, page = PagesThroughNixl(tmp_path, 1000, {}), page_of(1000)
    for name in "012":
        files.set(name, page)
    move = storage_nixl._Agent.move

    def failing(agent: Any, direction: str, file: int) -> None:
        # What is open for writing only cannot be read: NIXL's own error.
        other = os.open(tmp_path / "0.bin", os.O_WRONLY)
        try:
            move(agent, direction, other)
        finally:
            os.close(other)

    with monkeypatch.context() as patch:
        patch.setattr(storage_nixl._Agent, "move", failing)
        assert files.get("1", page) is None and files.get("2", page) is None
        with pytest.raises(OSError, match="NIXL ends a READ with NIXL_ERR"):
            files.get("0", page)
    assert files.corrupt == 2 and files.get("0", page) is page and not files.exists("1")


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({}, {}),
        ({"use_uring": "true"}, {"use_uring": "true"}),
        ({"use_posix_aio": True, "use_aio": "false"}, {"use_posix_aio": "true"}),
        ({"plugin": {"posix": {"active": True, "use_uring": "true"}, "gds": {"active": False}}}, {"use_uring": "true"}),
        ({"plugin": {"POSIX": {"active": "true"}}}, {}),
    ],
)
def test_nixls_options_are_the_engines(given, params):
    assert read_options("nixl", json.dumps(given), "timeout").own == params


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"plugin": {"gds": {"active": True}}}, "gds as the active plugin: .* only POSIX has been tried .* Give posix"),
        ({"plugin": {"posix": {}}}, "none as the active plugin"),
        ({"plugin": "posix"}, "has plugin 'posix': give"),
        ({"plugin": {"posix": {"active": True}}, "use_uring": True}, "with what is the plugin's inside"),
        ({"plugin": {"posix": {"active": True, "mount_point": "/"}}}, "mount_point for POSIX; decode knows use_aio"),
        ({"use_uring": "yes"}, "use_uring 'yes': give true or false"),
        ({"use_uring": True, "use_aio": True}, "use_aio and use_uring: give one of them"),
        ({"master_server_address": "a:1"}, "has master_server_address; decode knows"),
    ],
)
def test_of_nixls_options_what_is_wrong_is_refused(given, says):
    with pytest.raises(ValueError, match=f"--hicache-storage-backend-extra-config.*{says}"):
        read_options("nixl", json.dumps(given), "timeout")


def test_a_plugin_that_has_not_been_tried_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", "OBJ")
    with pytest.raises(ValueError, match="SGLANG_HICACHE_NIXL_BACKEND_PLUGIN is OBJ: .* only POSIX"):
        read_options("nixl", None, "timeout")


def test_a_directory_that_nixl_cannot_use(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path / "file" / "kv"))
    with pytest.raises(ValueError, match="nixl cannot use .*kv: .*SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"):
        BACKENDS["nixl"].open("model/rank", 1000, {}, 1)


def test_a_plugin_that_does_not_start_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path))
    both = {"use_aio": "true", "use_uring": "true"}
    with pytest.raises(ValueError, match="NIXL's plugin POSIX with use_aio, use_uring does not start"):
        BACKENDS["nixl"].open("model/rank", 1000, both, 1)


@pytest.mark.parametrize(("name", "module"), [("nixl", "nixl"), ("mooncake", "mooncake")])
def test_a_library_that_is_not_there_is_told_at_the_start(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    with pytest.raises(ValueError, match=f"--hicache-storage-backend {name} needs .* Install .*, or take the backend"):
        read_options(name, None, "timeout")


# ---- mooncake: options ----


@pytest.fixture
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MOONCAKE_", "SGLANG_HICACHE_MOONCAKE"))]:
        monkeypatch.delenv(name)


def test_mooncakes_options_are_the_engines(no_variables, monkeypatch, tmp_path, master):
    """The first of three places that names a master counts alone."""
    monkeypatch.setenv("MOONCAKE_MASTER", master.address)
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "here")
    told = read_options("mooncake", None, "timeout").own
    assert told == (master.address, "here", "P2PHANDSHAKE", "tcp", "", 4 * 1024**3, "")
    path = tmp_path / "mooncake.json"
    others = {"master_server_address": f"localhost:{master.port}", "protocol": "tcp", "local_buffer_size": 1}
    path.write_text(json.dumps(others))
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(path))
    told = read_options("mooncake", '{"extra_backend_tag": "mine"}', "timeout").own
    assert told == (f"localhost:{master.port}", "localhost", "P2PHANDSHAKE", "tcp", "", 4 * 1024**3, "mine")
    given = json.dumps({"master_server_address": master.address, "global_segment_size": "2GB", "weights": "w"})
    told = read_options("mooncake", given, "timeout")
    assert told.own.global_segment_size == 2 * 1024**3 and told.own.local_hostname == "localhost"
    assert told.weights == "w"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "and The environment has none. Give it as HOST:PORT in MOONCAKE_MASTER, or as"),
        (
            {"protocol": "tcp", "global_segment_size": "4gb"},
            "extra-config has none. Give it .* in master_server_address there, beside protocol, global_segment_size",
        ),
        ({"master_server_address": "a..b:1"}, "reaches no mooncake_master at a..b:1"),
        ({"master_server_address": f"{HOST}:\u00b2"}, "give HOST:PORT"),
        ({"master_server_address": f"{HOST}:{'9' * 5000}"}, "as the address of mooncake_master"),
        ({"master_server_address": f"{HOST}:1", "global_segment_size": "99999999999gb"}, "99999999999gb': give bytes"),
        ({"master_server_address": f"{HOST}:1", "global_segment_size": "9" * 5000}, "9': give bytes"),
        (
            {"master_server_address": f"{HOST}:1", "extra_backend_tag": 0},
            "extra-config has extra_backend_tag 0: give a",
        ),
        ({"master_server_address": "etcd://a:1"}, "'etcd://a:1' as the address of mooncake_master: give HOST:PORT"),
        ({"master_server_address": "a:b"}, "give HOST:PORT"),
        ({"master_server_address": 7}, "has master_server_address 7: give a text"),
        ({"master_server_address": f"{HOST}:1"}, f"reaches no mooncake_master at {HOST}:1: .* Start one, or name"),
        ({"master_server_address": f"{HOST}:99999"}, f"'{HOST}:99999' as the address of mooncake_master"),
        ({"master_server_address": f"{HOST}:1", "global_segment_size": "4tb"}, "global_segment_size '4tb': give bytes"),
        ({"master_server_address": f"{HOST}:1", "global_segment_size": True}, "global_segment_size True: give bytes"),
        ({"master_server_address": f"{HOST}:1", "standalone_storage": True}, "standalone_storage: .* Leave it out"),
        ({"client_server_address": "a:1"}, "client_server_address: .* Leave it out, and give master_server_address"),
        ({"master_server_address": f"{HOST}:1", "device_name": '{"0": "a"}'}, "device_name .*: give one for all"),
        ({"master_server_address": f"{HOST}:1", "extra_backend_tag": "a.b"}, "extra_backend_tag 'a.b': give ASCII"),
        ({"check_server": True}, "has check_server; decode knows"),
    ],
)
def test_of_mooncakes_options_what_is_wrong_is_refused(no_variables, given, says):
    begun = time.monotonic()
    if "reaches" in says and (why := mooncake_master.missing()):
        pytest.skip(why)
    with pytest.raises(ValueError, match=says):
        read_options("mooncake", json.dumps(given), "timeout")
    assert time.monotonic() - begun < 10


def test_a_file_without_a_master_is_told_of(no_variables, monkeypatch, tmp_path):
    (tmp_path / "mooncake.json").write_text('{"protocol": "tcp"}')
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(tmp_path / "mooncake.json"))
    with pytest.raises(ValueError, match="mooncake.json has none. Give it as HOST:PORT in master_server_address there"):
        read_options("mooncake", None, "timeout")


@pytest.mark.parametrize(("new", "told"), [(None, "10.0.0.7"), ("10.0.0.8", "10.0.0.8")])
def test_the_older_name_of_this_hosts_address_counts_as_with_the_engine(no_variables, monkeypatch, master, new, told):
    monkeypatch.setenv("MOONCAKE_MASTER", master.address)
    monkeypatch.setenv("LOCAL_HOSTNAME", "10.0.0.7")
    if new:
        monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", new)
    assert read_options("mooncake", None, "timeout").own.local_hostname == told


def test_a_mooncake_file_that_cannot_be_read(no_variables, monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(tmp_path / "nothing.json"))
    with pytest.raises(ValueError, match="SGLANG_HICACHE_MOONCAKE_CONFIG_PATH '.*nothing.json' cannot be read"):
        read_options("mooncake", None, "timeout")


def test_more_memory_than_there_is_is_told_at_the_start(master):
    options = storage_mooncake.MooncakeOptions(master.address, HOST, "P2PHANDSHAKE", "tcp", "", 1 << 46)
    with pytest.raises(ValueError, match=f"mooncake does not start at {master.address}: .* {1 << 45} bytes of this"):
        BACKENDS["mooncake"].open("model/rank", 1000, options, 2)


def test_less_memory_than_the_store_takes_is_told_at_the_start(master):
    options = storage_mooncake.MooncakeOptions(master.address, HOST, "P2PHANDSHAKE", "tcp", "", 1 << 24)
    with pytest.raises(ValueError, match=f"is {1 << 24} bytes for 2 ranks. Give {1 << 24} for each or more, or 0"):
        BACKENDS["mooncake"].open("model/rank", 1000, options, 2)
    # Who gives nothing uses what others give.
    stores = [BACKENDS["mooncake"].open("r", 100, options._replace(global_segment_size=n), 1) for n in (0, 1 << 24)]
    page = page_of(100)
    assert stores[0].set("0", page) and stores[1].get("0", page) is page
    for one in stores:
        one._store.close()


def test_a_tag_keeps_those_with_another_apart(master):
    options = storage_mooncake.MooncakeOptions(master.address, HOST, "P2PHANDSHAKE", "tcp", "", 1 << 24)
    stores = [BACKENDS["mooncake"].open("m/r", 100, options._replace(extra_backend_tag=tag), 1) for tag in ("", "a")]
    stores[0].set("0", page_of(100))
    assert [one.exists("0") for one in stores] == [True, False]
    for one in stores:
        one.clear()
        one._store.close()


# ---- mooncake: life ----


@pytest.mark.parametrize(("code", "fails"), [(-704, False), (-703, False), (-900, True), (-800, True)])
def test_who_reads_what_is_being_written_finds_nothing(master, monkeypatch, code, fails):
    """-703, seen of a page that two workers wrote; it is neither an error of the storage nor a page to be removed."""
    store, page = opened(master.kind, "kv", 100), page_of(100)
    store.set("0", page)
    real = store._store
    asked = SimpleNamespace(get_into=lambda *args: code, register_buffer=real.register_buffer)
    monkeypatch.setattr(store, "_store", asked)
    if fails:
        with pytest.raises(OSError, match=f"Mooncake reads no page: code {code}"):
            store.get("0", page)
    else:
        assert store.get("0", page) is None
    monkeypatch.setattr(store, "_store", real)
    assert not store.corrupt and store.get("0", page) is page


def test_a_process_keeps_its_own_way_to_end(master):
    """A library that put its own handlers of signals in their place would end a worker that is to drain first."""
    script = f"""
import os, signal, time
from sglang.srt.mem_cache.host_tier.storage_mooncake import MooncakeOptions, PagesInMooncake
told = []
numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
for number in numbers:
    signal.signal(number, lambda number, frame: told.append(number))
PagesInMooncake("r", 100, MooncakeOptions({master.address!r}, "{HOST}", "P2PHANDSHAKE", "tcp", "", 1 << 24))
for number in numbers:
    os.kill(os.getpid(), number)
    time.sleep(0.1)
print("told", *map(int, told), flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "told 15 2 1"), done.stderr[-2000:]


@pytest.fixture
def own_master(tmp_path):
    """A master that a test may end."""
    with mooncake_master.running(tmp_path) as started:
        yield started
        started.go_on()
        storage_kinds.close_clients()


def test_a_master_that_goes_away_costs_hits_until_it_is_back(own_master, monkeypatch, caplog):
    monkeypatch.setattr(storage_threads, "PAUSE_S", 0.05)
    caplog.set_level("INFO")
    one = StorageWorld("kv", kind=own_master.kind)
    prompt = tokens(1, 24)
    one.serve(prompt)
    one.forget()
    assert one.serve(prompt) == 24
    own_master.stop()
    one.forget()
    for start in (1, 1, 100):
        assert one.serve(tokens(start, 24)) == 0
        one.forget()
        time.sleep(0.06)
    assert caplog.text.count("Reading from the storage of KV") == 1 and "Mooncake does not say" in caplog.text
    own_master.start()
    # The client finds it by itself; what the store had is gone with it.
    end = time.monotonic() + 60
    while one.serve(prompt) != 24:
        assert time.monotonic() < end
        one.forget()
        time.sleep(0.2)
    assert "works again" in caplog.text
    one.close()


def test_what_went_with_a_master_is_written_again(own_master, monkeypatch):
    """Also the beginning of a conversation, without which nobody could use what is written behind it."""
    monkeypatch.setattr(storage_threads, "PAUSE_S", 0.05)
    one = StorageWorld("kv", kind=own_master.kind)
    prompt = tokens(1, 24)
    one.serve(prompt)
    own_master.stop()
    own_master.start()
    end = time.monotonic() + 60
    # The client finds it by itself.
    while one.files._store.put("ready", b"1"):
        assert time.monotonic() < end
        time.sleep(0.2)
    one.serve(prompt + tokens(500, 24))
    other = StorageWorld("kv", kind=own_master.kind)
    assert other.serve(prompt + tokens(500, 24)) == 48
    for world in one, other:
        world.close()


def test_a_worker_knows_that_somebody_else_has_cleared_the_store(master):
    one, other = opened(master.kind, "marks", 100), opened(master.kind, "marks", 100)
    assert not one.was_cleared() and not other.was_cleared()
    for _ in range(2):
        # It knows of its own.
        assert one.clear() and not one.was_cleared()
        assert other.was_cleared() and not other.was_cleared()
    # Another's rank is nobody else's.
    assert opened(master.kind, "marks2", 100).clear() and not one.was_cleared()


def test_a_master_that_hangs_holds_up_no_step(own_master):
    one, two = StorageWorld("kv", kind=own_master.kind), None
    prompt = tokens(1, 24)
    one.serve(prompt)
    two = StorageWorld("kv", kind=own_master.kind, limits=PATIENT._replace(base_s=0.3, per_ki_s=0.0))
    own_master.hang()
    begun, worst = time.monotonic(), 0.0
    decode_req = two.arrive(prompt)
    two.handshake(decode_req)
    while decode_req in two.queue.queue:
        before = thread_time.now()
        two.step()
        worst = max(worst, thread_time.now() - before)
        time.sleep(0.005)
    # Its time was up; a step that waited for the master would take as long as it hangs.
    assert 0.3 <= time.monotonic() - begun < 10 and worst < 2
    assert (decode_req.kv_receiver.prefix_len, two.tier.state()["storage"]["late"]) == (0, 1)
    own_master.go_on()
    for world in one, two:
        world.close()


def store_at(master: Any, page_bytes: int, given: int = 1 << 24, folder: str = "rank") -> PagesInMooncake:
    """A client of ``master``'s store that gives it ``given`` bytes."""
    options = storage_mooncake.MooncakeOptions(master.address, HOST, "P2PHANDSHAKE", "tcp", "", given)
    return PagesInMooncake(folder, page_bytes, options)


def fill(store: PagesInMooncake, prefix: str = "other/") -> list[str]:
    """Leave no room in a store, with objects of somebody else that the master does not evict for a while."""
    made = []
    for size in (1 << 20, 1 << 16, 1 << 12, 1 << 8, 1):
        while store._store.put(key := f"{prefix}{len(made)}", bytes(size)) == 0:
            made.append(key)
            store._store.is_exist(key)
    return made


def test_a_store_that_is_full_takes_the_place_of_what_nobody_wants(own_master, monkeypatch):
    """Each page that it has room for at once is followed by one that it refuses until it has evicted another one."""
    # On a host that has other work, too.
    monkeypatch.setattr(storage_mooncake, "ROOM_S", (0.025,) * 400)
    store, page = store_at(own_master, 1 << 20), page_of(1 << 20)
    for i in range(60):
        # As whoever writes asks first.
        assert not store.exists(f"{i:x}") and store.set(f"{i:x}", page), i
    assert store.get(f"{59:x}", page) is page and not store.corrupt
    assert len(mooncake_master.keys(own_master._metrics_port)) < 20
    store._store.close()


def test_a_store_that_is_full_refuses_without_an_error(own_master, caplog):
    """What it has was asked for a moment ago, and stays for a while."""
    store, page = store_at(own_master, 1 << 20), page_of(1 << 20)
    # What is asked for stays.
    assert store.set("0", page) and store.exists("0")
    made = fill(store)
    begun = time.monotonic()
    assert [store.set(f"{i:x}", page) for i in range(1, 4)] == [False] * 3
    assert time.monotonic() - begun < 5 and store.get("0", page) is page
    assert caplog.text.count("has no room for a page") == 1 and "global_segment_size" in caplog.text
    # It has the place of one that is gone at once.
    for key in made[:2]:
        store._store.remove(key, True)
    assert store.set("1", page)
    store._store.close()


def test_a_store_that_stays_full_is_not_waited_for_with_each_page(own_master, monkeypatch):
    """Or all that waits to be written, and whoever clears it, would wait for each of them."""
    store, page, now, slept = store_at(own_master, 1 << 20), page_of(1 << 20), [100.0], []
    made, pages = fill(store), map("{:x}".format, range(99))
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(storage_mooncake, "time", clock)
    once = [*storage_mooncake.ROOM_S]
    assert [store.set(next(pages), page) for _ in range(5)] == [False] * 5 and slept == once
    now[0] += storage_mooncake.FULL_S
    assert [store.set(next(pages), page) for _ in range(5)] == [False] * 5 and slept == 2 * once
    for key in made:
        store._store.remove(key, True)
    # What is asked for stays; the master would evict it for what comes next, before or after that is refused.
    assert store.set(key := next(pages), page) and store.exists(key)
    # It has had room since: what it refuses now may find some.
    fill(store, "more/")
    assert not store.set(next(pages), page) and slept == 3 * once
    store._store.close()


def test_a_store_without_room_for_a_mark_is_none_that_was_cleared(own_master):
    """Or all that is in host memory would be looked for again with each request, which keeps the store full."""
    store = store_at(own_master, 100)
    assert store._store.remove(store._mark, True) == 0
    made = fill(store)
    assert [store.was_cleared() for _ in range(3)] == [False] * 3
    # When there is room, nobody knows what has been removed meanwhile.
    store._store.remove(made[0], True)
    assert [store.was_cleared() for _ in range(3)] == [True, False, False]
    store._store.close()


def test_a_store_to_which_nobody_gives_memory_is_full(own_master):
    store, page = store_at(own_master, 1000, given=0), page_of(1000)
    assert not store.exists("0") and not store.set("0", page) and store.get("0", page) is None
    assert not store.was_cleared() and store.clear() and not store.was_cleared()
    store._store.close()


def test_a_full_store_whose_master_goes_away_fails(own_master, monkeypatch):
    """While a page waits for room."""
    store = store_at(own_master, 1000)
    fill(store)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda wait_s: own_master.stop())
    monkeypatch.setattr(storage_mooncake, "time", clock)
    with pytest.raises(OSError, match="Mooncake writes no page: code"):
        store.set("0", page_of(1000))
    own_master.start()
    store._store.close()


def test_a_mark_that_cannot_be_put_is_put_later(own_master):
    """As where the part of the store that a worker which has just ended gave was chosen for it."""
    store = store_at(own_master, 100)
    real = store._store
    assert real.remove(store._mark, True) == 0
    # Its code for a transfer that has failed.
    store._store = SimpleNamespace(is_exist=real.is_exist, put=lambda key, value: -800)
    assert [store.was_cleared() for _ in range(3)] == [False] * 3
    store._store = real
    assert [store.was_cleared() for _ in range(3)] == [True, False, False]
    real.close()


def test_who_is_refused_a_page_goes_on_writing_and_reading(own_master):
    """Each page that found no room had all others wait for 5 s, as if the store were broken."""
    one, two = StorageWorld("kv", kind=own_master.kind), StorageWorld("kv", kind=own_master.kind)
    prompt, refused = tokens(1, 24), tokens(100, 24)
    one.serve(prompt)
    # What is asked for stays.
    assert all(map(one.files.exists, names_of(prompt)))
    made = fill(one.files)
    one.serve_in_one(refused)
    state = one.storage.state()
    # The first page was, and what is behind it would be of no use.
    assert (state["no_room"], state["written"], state["failed"], state["dropped"]) == (24, 24, 0, 0)
    assert not one.threads.writing.pausing and two.serve(prompt) == 24 and two.serve(refused) == 0
    store = one.files._store
    for key in made:
        store.remove(key, True)
    # The master still evicts for what it has refused: let it have that.
    store.put("victim", b"1")
    one.until(lambda: not any(key == "victim" for key in mooncake_master.keys(own_master._metrics_port)), step=False)
    # Written with the next turn, at once.
    one.serve(refused + tokens(300, 8))
    two.forget()
    assert two.serve(refused + tokens(300, 8)) == 32
    for world in one, two:
        world.close()


def test_a_page_whose_writer_was_killed_is_not_there(own_master, tmp_path):
    """Its memory is gone with it: what it has written is not found any more, and nobody reads a part."""
    script = f"""
import os, signal, torch
from sglang.srt.mem_cache.host_tier.storage_mooncake import MooncakeOptions, PagesInMooncake
one = PagesInMooncake("r", 1000, MooncakeOptions({own_master.address!r}, "{HOST}", "P2PHANDSHAKE", "tcp", "", 1 << 24))
one.set("0", torch.ones(1000, dtype=torch.uint8))
print("written", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert "written" in done.stdout and done.returncode == -signal.SIGKILL
    other, page = store_at(own_master, 1000, folder="r"), torch.zeros(1000, dtype=torch.uint8)
    end = time.monotonic() + 60
    while other.exists("0"):
        # Until the master has noticed.
        assert time.monotonic() < end
        try:
            # It may notice between the two calls.
            assert other.get("0", page) is None
        except OSError as error:
            assert "Mooncake reads no page" in str(error)
        time.sleep(0.5)
    assert other.get("0", page) is None and not other.corrupt and not page.any()
    assert other.set("0", page_of(1000)) and other.get("0", page) is page
    other._store.close()


# ---- server arguments ----


def worker(**given: Any) -> Any:
    """Options of a decode worker with a Mooncake store."""
    args = SimpleNamespace(
        hicache_size=0,
        hicache_ratio=2.0,
        tp_size=1,
        nnodes=1,
        dp_size=1,
        enable_dp_attention=False,
        model_path="model",
        speculative_algorithm=None,
        speculative_draft_model_path=None,
        hicache_storage_backend="mooncake",
        hicache_storage_backend_extra_config=None,
        hicache_storage_prefetch_policy="timeout",
    )
    vars(args).update(given)
    return args


@pytest.fixture
def container(no_variables, monkeypatch, tmp_path, master):
    """With 30 GiB left of its limit, where workers are told of a master, and of 8 GiB for its store."""
    for name, text in {"max": 40 << 30, "current": 10 << 30, "stat": "inactive_file 0"}.items():
        (tmp_path / f"memory.{name}").write_text(str(text))
    monkeypatch.setenv("MOONCAKE_MASTER", master.address)
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "8gb")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 50))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "says"),
    [
        # 8 GiB in all, and 16 MiB of each rank.
        ({"hicache_size": 8, "tp_size": 2}, "--hicache-size 8 and --hicache-storage.* take 24.6 GB .* for 2 ranks"),
        # Of each replica, and of each DP rank.
        ({"dp_size": 3}, "^--hicache-storage-backend mooncake with global_seg.*_SIZE. takes 25.8 GB .* for 3 ranks"),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, "takes 34.4 GB of host memory for 4 ranks"),
        ({"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}, "takes 34.5 GB of host memory for 8 ranks"),
    ],
)
def test_memory_for_the_store_is_counted_at_the_start(container, given, says):
    args = worker(**given)
    with pytest.raises(ValueError, match=f"{says}, and this container has 32.2 GB free.* Give less, or leave"):
        check_free(args, taken_of_rank(args, options_of(args)), container)
    # Half of the ranks on this host.
    args.nnodes = 2
    check_free(args, taken_of_rank(args, options_of(args)), container)


def test_without_a_store_there_is_nothing_to_count(container):
    for name in None, "file":
        args = worker(hicache_storage_backend=name, hicache_size=8, tp_size=2)
        check_free(args, taken_of_rank(args, options_of(args)), container)


def test_memory_for_the_store_is_counted_when_the_ratio_is_known(container):
    """Of this rank, whatever the others have taken by then."""
    args = worker(tp_size=2)
    check_rank(args, 16e9, taken_of_rank(args, options_of(args)), container)
    says = "^--hicache-ratio 2 and --hicache-storage.* take 22.3 GB of host memory for 1 rank, and this container has"
    with pytest.raises(ValueError, match=says):
        check_rank(args, 18e9, taken_of_rank(args, options_of(args)), container)
    # It has been seen to before the model was loaded.
    args.hicache_size = 8
    check_rank(args, 18e9, taken_of_rank(args, options_of(args)), container)


def test_a_worker_counts_the_memory_of_its_store_before_its_model_is_loaded(container, monkeypatch, tmp_path):
    model = make_model(tmp_path / "m")
    decode = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl", FLAG]
    stored = ["--enable-hierarchical-cache", "--hicache-storage-backend", "mooncake"]
    args = server_args.prepare_server_args(["--model-path", str(model), "--device", "cpu", *decode, *stored])
    args.check_server_args()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 << 30))
    with pytest.raises(ValueError, match="backend mooncake with global_.* takes 8.6 GB .* this machine has 17.2 GB"):
        args.check_server_args()


def small_pool() -> MHATokenToKVPool:
    return MHATokenToKVPool(1 << 12, 1, torch.float32, 1, 64, 1, "cpu", False)


def tree_over(pool: Any) -> Any:
    """What is asked of a tree before host memory is taken."""
    return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), page_size=1)


def test_a_worker_counts_the_memory_of_its_store_when_its_pool_is_there(container, monkeypatch):
    """With the draft's, before any of it is taken."""
    args, pool = worker(), small_pool()
    tree = tree_over(pool)
    free, taken = 10 << 30, taken_of_rank(args, options_of(args))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(tier, "host_pool", lambda *args: pytest.fail("memory was taken"))
    for draft, needed in (None, 2), (pool, 4):
        # One byte less than the pool's, as many times as the ratio says, and the store's.
        free = (10 << 30) + taken.size + needed * 512 * (pool.size + 1) - 1
        with pytest.raises(ValueError, match="--hicache-ratio 2 and --hicache-storage-backend mooncake with .* take"):
            tier.add_host_tier(tree, args, lambda: None, draft, stored=taken)
        free += 1
        with pytest.raises(pytest.fail.Exception, match="memory was taken"):
            tier.add_host_tier(tree, args, lambda: None, draft, stored=taken)


@pytest.mark.parametrize("place", ["model", "draft"])
def test_a_pool_that_is_not_known_is_told_before_what_it_takes(container, place):
    """Nobody knows how to ask it for that."""
    pool, draft = (SimpleNamespace(), None) if place == "model" else (small_pool(), SimpleNamespace())
    with pytest.raises(ValueError, match="is not verified on decode for SimpleNamespace"):
        tier.add_host_tier(tree_over(pool), worker(), lambda: None, draft)


def test_a_tree_is_built_with_what_its_storage_takes(container, monkeypatch):
    """8 GiB over the four TP ranks of a DP rank, and 16 MiB."""
    args, told = worker(tp_size=8, dp_size=2, enable_dp_attention=True, enable_hierarchical_cache=True), []
    monkeypatch.setattr(kv_cache_builder, "add_host_tier", lambda *given: told.append(given))
    for name in "add_storage", "get_attention_tp_rank", "get_attention_tp_size":
        monkeypatch.setattr(kv_cache_builder, name, lambda *given: None)
    monkeypatch.setattr(kv_cache_builder, "get_attention_tp_group", lambda: SimpleNamespace(cpu_group=None))
    engines = DecodeWorker(64, 1, max_reqs=4, max_len=64, reserved=1, tree_type=RadixCache).tree
    runner: Any = SimpleNamespace(token_to_kv_pool=None)
    kv_cache_builder.build(cache_support.DECODE, engines, args, runner, lambda: 0, lambda: None)
    ((tree, _, _, draft, host_class, taken),) = told
    assert isinstance(tree, HostTierRadixCache) and draft is None and host_class is StoredHostTree
    assert taken.size == (2 << 30) + (16 << 20)


@pytest.mark.parametrize(("flag", "layout"), [(True, "layer_first"), (False, "page_first_direct")])
def test_the_layout_of_host_memory_stays_below_decodes_tree(flag, layout):
    """The engine's Mooncake storage needs another one, to which it copies in ways that a CPU host lacks."""
    args = server_args.ServerArgs.__new__(server_args.ServerArgs)
    args.disaggregation_decode_enable_radix_cache = flag
    args.hicache_storage_backend, args.hicache_mem_layout, args.hicache_io_backend = "mooncake", "layer_first", "direct"
    args._resolve_storage_layout_compatibility()
    assert args.hicache_mem_layout == layout
