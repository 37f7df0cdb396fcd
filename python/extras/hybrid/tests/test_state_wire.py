"""States of hybrid models on the wire: with every prompt, full hits included, written like KV, and never cut.

So are windows, in pages, where layers with a sliding window have a pool of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import test_mooncake_wire as mooncake
import test_nixl_wire as nixl
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.state_sizes import unlike_states

# Slots of one request on prefill and on decode.
SLOTS = (3, 5)
# Pages of its window, not in the order of the pool.
WINDOWS = ([3, 4, 1], [5, 2, 3])
# A hit in part, with a partly filled page, and a full hit.
PROMPTS = [(26, 8), (24, 24)]


@pytest.fixture
def over_nixl(monkeypatch) -> nixl.World:
    return nixl.World(monkeypatch, states=SLOTS)


@pytest.fixture
def over_mooncake(monkeypatch) -> Iterator[mooncake.World]:
    world = mooncake.World(monkeypatch, states=SLOTS)
    for pool in world.prefill[0].states:
        pool[:] = np.arange(1, pool.size + 1).reshape(pool.shape) % 251
    yield world
    world.close()


@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_trap_05_nixl_brings_the_state_however_much_decode_holds(over_nixl, monkeypatch, prompt_len, prefix_len):
    """Row 5: a full hit of a model with state never completed."""
    over_nixl.wire.held = True
    counted = over_nixl.prefill[0].manager.events = mooncake.Counters()
    request = over_nixl.request(7, prompt_len, prefix_len).bootstrap()
    request.send()
    # Each part is waited for, on both sides: here that of the state alone is missing.
    state = [t for t in over_nixl.wire.transfers if t.notification == b"7_state_0"]
    assert len(state) == 1
    for transfer in over_nixl.wire.transfers:
        if transfer is not state[0]:
            transfer.finish()
    assert request.senders[0].poll() == KVPoll.WaitingForInput
    assert request.receivers[0].poll() not in (KVPoll.Success, KVPoll.Failed)
    state[0].finish()
    request.wait_senders(KVPoll.Success)
    request.wait_receivers(KVPoll.Success)
    base, item = 4 << 20, nixl.STATE_ITEM
    target = sorted((int(at), int(size)) for at, size, _ in state[0].targets)
    assert target == [(base + 5 * item, item), (base + (1 << 20) + 5 * 2 * item, 2 * item)]
    assert counted.state_bytes == 3 * item


def test_nixl_fails_a_request_whose_state_cannot_be_sent(over_nixl):
    request = over_nixl.request(7).start_prefill().start_decode().ask(states=[])
    request.wait_senders(KVPoll.WaitingForInput)
    for sender in request.senders:
        sender.init(request.num_pages, 1)
    request.send()
    request.assert_fails("transfer over NIXL failed")


@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_mooncake_brings_the_state_however_much_decode_holds(over_mooncake, prompt_len, prefix_len):
    request = over_mooncake.request(7, prompt_len, prefix_len).bootstrap()
    request.send()
    request.finish()
    request.assert_landed()
    source, target = over_mooncake.prefill[0], over_mooncake.decode[0]
    for theirs, ours in zip(source.states, target.states, strict=True):
        expected = np.zeros_like(ours)
        expected[SLOTS[1]] = theirs[SLOTS[0]]
        assert (ours == expected).all()
    assert source.manager.events.state_bytes == 64


@pytest.mark.parametrize("prefix_len", [0, 24, None], ids=["miss", "full hit", "no flag"])
def test_trap_06_a_state_that_mooncake_cannot_write_is_no_success(over_mooncake, monkeypatch, prefix_len):
    """Row 6: the return code of the state's write is ignored. Without the flag it still is."""
    library = over_mooncake.prefill[0].library
    write = library.batch_transfer_sync

    def broken(session: str, sources: list, targets: list, lengths: list) -> int:
        return -1 if lengths == [24, 40] else write(session, sources, targets, lengths)

    monkeypatch.setattr(library, "batch_transfer_sync", broken)
    request = over_mooncake.request(7, 24, prefix_len).bootstrap()
    request.send()
    if prefix_len is None:
        request.finish()
        return
    ours, theirs = request.fail()
    assert "its state could not be written" in ours and "its state could not be written" in theirs


@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_nixl_brings_the_window_however_much_decode_holds(monkeypatch, prompt_len, prefix_len):
    """Page for page; and a failure is told when it is written, and not before."""
    world = nixl.World(monkeypatch, windows=WINDOWS)
    counted = world.prefill[0].manager.events = mooncake.Counters()
    world.wire.held = True
    request = world.request(7, prompt_len, prefix_len).bootstrap()
    request.receivers[0].fenced = True
    request.send()
    (window,) = [t for t in world.wire.transfers if t.notification == b"7_state_0"]
    for transfer in world.wire.transfers:
        if transfer is not window:
            transfer.finish()
    assert request.receivers[0].poll() not in (KVPoll.Success, KVPoll.Failed)
    base, item = 4 << 20, nixl.STATE_ITEM
    written = {int(at) + n for at, size, _ in window.targets for n in range(int(size))}
    starts = [base + pool * (1 << 20) + page * item for pool in (0, 1) for page in WINDOWS[1]]
    assert written == {at + n for at in starts for n in range(item)}
    assert counted.state_bytes == 3 * 2 * item
    request.senders[0].fail("out of order")
    assert request.senders[0].poll() == KVPoll.WaitingForInput and not world.prefill[0].told("fail")
    window.finish()
    request.wait_senders(KVPoll.Failed)
    nixl.until(request.receivers[0].writers_done, "the pages are decode's again")


def test_nixl_fails_a_request_whose_windows_are_not_of_one_size(monkeypatch):
    """The two workers were started with different windows, or one of them counts wrongly."""
    world = nixl.World(monkeypatch, windows=WINDOWS)
    request = world.request(7).start_prefill().start_decode().ask(states=WINDOWS[1][:2])
    request.wait_senders(KVPoll.WaitingForInput)
    for sender in request.senders:
        sender.init(request.num_pages, 1)
    request.send()
    request.assert_fails("State index length mismatch")


@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_mooncake_brings_the_window_however_much_decode_holds(monkeypatch, prompt_len, prefix_len):
    world = mooncake.World(monkeypatch, windows=WINDOWS)
    for pool in world.prefill[0].states:
        pool[:] = np.arange(1, pool.size + 1).reshape(pool.shape) % 251
    request = world.request(7, prompt_len, prefix_len).bootstrap()
    request.send()
    request.finish()
    request.assert_landed()
    for theirs, ours in zip(world.prefill[0].states, world.decode[0].states, strict=True):
        expected = np.zeros_like(ours)
        expected[WINDOWS[1]] = theirs[WINDOWS[0]]
        assert (ours == expected).all()
    assert world.prefill[0].manager.events.state_bytes == 3 * 64
    world.close()


@pytest.mark.parametrize("prefix_len", [0, 24])
def test_mooncake_fails_a_request_whose_windows_are_not_of_one_size(monkeypatch, prefix_len):
    """The engine sends what there is, or what fits, and reports a success."""
    world = mooncake.World(monkeypatch, windows=(WINDOWS[0], WINDOWS[1][:2]))
    request = world.request(7, 24, prefix_len).bootstrap()
    request.send()
    ours, theirs = request.fail()
    assert "decode expects 2" in ours and "decode expects 2" in theirs
    world.close()


# What both workers' clients are told where decode has its states in a type of half the size.
OTHER_TYPES = {nixl: "slots of 48 and 96 bytes.*96 and 192", mooncake: "slots of 12 and 20 bytes.*24 and 40"}


def halve_states(world) -> None:
    """Decode has them in a type of half the size, as with another SGLANG_MAMBA_SSM_DTYPE."""
    for rank in world.decode:
        rank.manager.kv_args.state_item_lens = [size // 2 for size in rank.manager.kv_args.state_item_lens]


@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_nixl_refuses_a_decode_worker_whose_states_have_another_type(over_nixl, prompt_len, prefix_len):
    """Prefill counts slots by its own size: it would write over other requests' states, and report a success."""
    halve_states(over_nixl)
    request = over_nixl.request(7, prompt_len, prefix_len).start_prefill().start_decode().ask()
    request.assert_fails(f"{OTHER_TYPES[nixl]}.*SGLANG_MAMBA_SSM_DTYPE")
    assert not over_nixl.wire.transfers


@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_mooncake_refuses_a_decode_worker_whose_states_have_another_type(over_mooncake, prompt_len, prefix_len):
    halve_states(over_mooncake)
    request = over_mooncake.request(7, prompt_len, prefix_len).start_prefill().start_decode().ask()
    for reason in request.fail():
        assert re.search(OTHER_TYPES[mooncake], reason)
    assert not any(pool.any() for pool in over_mooncake.decode[0].states)


@pytest.mark.parametrize("kind", [nixl, mooncake])
def test_prefill_says_the_same_cause_when_decode_asks_before_its_request_is_there(monkeypatch, kind):
    """Decode, told of the refusal, gives the request up; that was all that prefill's client heard."""
    world = kind.World(monkeypatch, states=SLOTS)
    halve_states(world)
    request = world.request(7, 26, 8).start_decode().ask()
    request.wait_receivers(KVPoll.Failed)
    rooms = world.prefill[0].manager.rooms
    request.receivers[0].cancel()
    nixl.until(lambda: 7 in rooms.ended, "decode has given it up")
    request.start_prefill().wait_senders(KVPoll.Failed)
    assert re.search(OTHER_TYPES[kind], request.senders[0].failure_reason())
    getattr(world, "close", lambda: None)()


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
    world = nixl.World(monkeypatch, prefill_tp, prefill_tp, states=SLOTS)
    manager = world.decode[0].manager
    manager.attn_tp_size = decode_tp
    info = common.PrefillServerInfo(prefill_tp, 1, 1, 1, nixl.PAGE, "auto", True)
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
