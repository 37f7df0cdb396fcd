"""States of hybrid models on the wire: with every prompt, full hits included, written like KV, and never cut.

So are windows, in pages, where layers with a sliding window have a pool of their own.
"""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import mooncake_world
import nixl_world
import numpy as np
import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.state_sizes import unlike_states
from waiting import until
from wire_ends import reasons, wait_quiet

# Slots of one request on prefill and on decode.
SLOTS = (3, 5)
# Pages of its window, not in the order of the pool.
WINDOWS = ([3, 4, 1], [5, 2, 3])
KINDS: dict[str, dict[str, Any]] = {"states": {"states": SLOTS}, "windows": {"windows": WINDOWS}}
# A hit in part, with a partly filled page, and a full hit.
PROMPTS = [(26, 8), (24, 24)]


@pytest.fixture
def over_nixl(monkeypatch) -> nixl_world.World:
    return nixl_world.World(monkeypatch, states=SLOTS)


def assert_state_landed(world: Any) -> int:
    """All of it and nothing else is where decode wants it; its bytes."""
    if isinstance(world, nixl_world.World):
        (state,) = [transfer for transfer in world.wire.transfers if transfer.notification == b"7_state_0"]
        written = {int(at) + n for at, size, _ in state.targets for n in range(int(size))}
        sizes, base = world.decode[0].manager.kv_args.state_item_lens, 4 << 20
        places = itertools.product(enumerate(sizes), world.states[1])
        starts = [(base + pool * (1 << 20) + place * size, size) for (pool, size), place in places]
        assert written == {at + n for at, size in starts for n in range(size)}
        return len(written)
    for theirs, ours in zip(world.prefill[0].states, world.decode[0].states, strict=True):
        expected = np.zeros_like(ours)
        expected[world.states[1]] = theirs[world.states[0]]
        assert (ours == expected).all()
    return sum(pool.shape[1] for pool in world.decode[0].states) * len(world.states[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_trap_05_the_state_comes_however_much_decode_holds(make_wire, backend, kind, prompt_len, prefix_len):
    """Row 5: a full hit of a model with state never completed. Each part is waited for, on both sides."""
    world = make_wire(**KINDS[kind])
    (counters,) = world.count()
    if backend == "mooncake":
        for pool in world.prefill[0].states:
            pool[:] = np.arange(1, pool.size + 1).reshape(pool.shape) % 251
    world.hold()
    request = world.request(7, prompt_len, prefix_len).bootstrap().send()
    if backend == "nixl":
        for transfer in world.wire.transfers:
            if b"state" not in transfer.notification:
                transfer.finish()
    assert request.senders[0].poll() == KVPoll.WaitingForInput
    assert request.receivers[0].poll() not in (KVPoll.Success, KVPoll.Failed)
    world.let_go()
    request.finish()
    request.assert_landed()
    assert counters.state_bytes == assert_state_landed(world)


def test_nixl_tells_a_failure_when_the_window_is_written_and_not_before(monkeypatch):
    world = nixl_world.World(monkeypatch, windows=WINDOWS)
    world.hold()
    request = world.request(7).bootstrap(fenced=True).send()
    request.senders[0].fail("out of order")
    for transfer in world.wire.transfers:
        assert request.senders[0].poll() == KVPoll.WaitingForInput and not world.prefill[0].told("fail")
        transfer.finish()
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)


@pytest.mark.parametrize(
    ("kind", "states", "reason"),
    [("states", [], "transfer over NIXL failed"), ("windows", WINDOWS[1][:2], "State index length mismatch")],
)
def test_nixl_fails_a_request_whose_state_cannot_be_sent(monkeypatch, kind, states, reason):
    """As of two workers that were started with different windows."""
    world = nixl_world.World(monkeypatch, **KINDS[kind])
    world.request(7).start_prefill().start_decode().ask(states=states).begin().send().assert_fails(reason)


@pytest.mark.parametrize("prefix_len", [0, 24])
def test_mooncake_fails_a_request_whose_windows_are_not_of_one_size(monkeypatch, prefix_len):
    """The engine sends what there is, or what fits, and reports a success."""
    world = mooncake_world.World(monkeypatch, windows=(WINDOWS[0], WINDOWS[1][:2]))
    for reason in world.request(7, 24, prefix_len).bootstrap().send().fail():
        assert "decode expects 2" in reason
    world.close()


@pytest.mark.parametrize("prefix_len", [0, 24, None], ids=["miss", "full hit", "no flag"])
def test_trap_06_a_state_that_mooncake_cannot_write_is_no_success(monkeypatch, prefix_len):
    """Row 6: the return code of the state's write is ignored. Without the flag it still is."""
    world = mooncake_world.World(monkeypatch, states=SLOTS)
    library = world.prefill[0].library
    write = library.batch_transfer_sync

    def broken(session: str, sources: list, targets: list, lengths: list) -> int:
        return -1 if lengths == [24, 40] else write(session, sources, targets, lengths)

    monkeypatch.setattr(library, "batch_transfer_sync", broken)
    request = world.request(7, 24, prefix_len).bootstrap().send()
    if prefix_len is None:
        request.finish()
    else:
        assert all("its state could not be written" in reason for reason in request.fail())
    world.close()


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_a_decode_worker_whose_states_have_another_type_is_refused(
    make_wire, backend, prompt_len, prefix_len, asked_before
):
    """Prefill counts slots by its own size: it would write over other requests' states, and report a success.

    As with another SGLANG_MAMBA_SSM_DTYPE. asked_before: decode, told of the refusal, gives the request up before it
    comes to prefill; that was all that prefill's client heard.
    """
    world = make_wire(states=SLOTS)
    for rank in world.decode:
        rank.manager.kv_args.state_item_lens = [size // 2 for size in rank.manager.kv_args.state_item_lens]
    request = world.request(7, prompt_len, prefix_len)
    if not asked_before:
        request.start_prefill()
    request.start_decode().ask()
    request.wait_receivers(KVPoll.Failed)
    found = reasons(request.receivers)
    request.receivers[0].cancel()
    if asked_before:
        until(lambda: 7 in world.prefill[0].manager.rooms.ended, "decode has given it up")
        request.start_prefill()
    request.wait_senders(KVPoll.Failed)
    sizes = {"nixl": "slots of 48 and 96 bytes.*96 and 192", "mooncake": "slots of 12 and 20 bytes.*24 and 40"}[backend]
    for reason in (*found, *reasons(request.senders)):
        assert re.search(f"{sizes}.*SGLANG_MAMBA_SSM_DTYPE", reason)


def are_alike(ours: dict, theirs: dict) -> bool:
    table = {"decode": SimpleNamespace(**theirs)}
    manager = SimpleNamespace(kv_args=SimpleNamespace(**ours), attn_tp_size=1, decode_kv_args_table=table)
    return unlike_states(manager, "decode") is None


@pytest.mark.parametrize(
    ("ours", "theirs", "alike"),
    [
        ([96, 192], [96, 192], True),
        ([96, 192], [192, 96], False),
        ([96, 192], [96, 384], False),
        # A stage of several has some of the layers.
        ([96], [96, 96, 96], True),
        ([96], [48, 48, 48], False),
        # A decode worker that does not say, and models without states.
        ([96, 192], [], True),
        ([], [], True),
    ],
)
def test_sizes_of_states(ours, theirs, alike):
    assert are_alike({"state_item_lens": ours}, {"dst_state_item_lens": theirs}) == alike


@pytest.mark.parametrize(("size", "alike"), [(24, True), (12, False)])
def test_sizes_of_states_that_are_cut(size, alike):
    """The engine's own way over Mooncake, between two TP sizes; a decode worker without the flag may take it."""
    half = {"dst_attn_tp_size": 2, "dst_state_item_lens": [size], "dst_state_dim_per_tensor": [4]}
    assert are_alike({"state_item_lens": [48], "state_dim_per_tensor": [8]}, half) == alike


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_states_are_not_cut(monkeypatch, prefill_tp, decode_tp):
    """NIXL has no way to; Mooncake's would give a rank another's channels of the convolution."""
    world = nixl_world.World(monkeypatch, prefill_tp, prefill_tp, states=SLOTS)
    manager = world.decode[0].manager
    manager.attn_tp_size = decode_tp
    info = common.PrefillServerInfo(prefill_tp, 1, 1, 1, nixl_world.PAGE, "auto", True)
    with pytest.raises(ValueError, match=f"TP size {prefill_tp} and this decode worker {decode_tp}.*same --tp-size"):
        manager._resolve_rank_mapping(info)
    manager.kv_args.state_data_ptrs, manager.kv_args.state_type = [], "none"
    manager._resolve_rank_mapping(info)


def test_a_prefill_without_this_extra_refuses_what_it_would_not_send(over_nixl, monkeypatch):
    """On a full hit it sent no state, for which decode waited until its time was over."""
    core = [one for one in common.CommonKVManager.__mro__ if "unfit" in vars(one)][-1]
    monkeypatch.setattr(common.CommonKVManager, "unfit", core.unfit)
    request = over_nixl.request(7, 24, 24).start_prefill().start_decode().ask()
    request.assert_fails("this prefill keeps more than KV, and runs without the extra for such models")
