"""Which prefills drop what decode computes, and how they hear of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from prefill_front import bootstrap_server
from sglang.srt import server_args
from sglang.srt.disaggregation import peer_calls
from sglang.srt.disaggregation.common import bootstrap_routes, device_names
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager
from sglang.srt.disaggregation.common.prefill_peers import PrefillPeers, parse_capabilities
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_VERSION
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.computed_answers import COMPUTED_ROUTE
from test_refused_requests import ENGINE, manager


@pytest.mark.parametrize("asked", ["auto", "128"])
@pytest.mark.parametrize("devices", [[], ["aa"], ["aa", "bb"]])
def test_by_default_none_drops_prompts_that_computes_on_the_same_device(monkeypatch, asked, devices):
    """What decode computes there takes prefill's time. Who names a number of tokens wants them computed here."""
    ranks = bootstrap_routes.RegisteredRanks()
    place = {"attn_dp_rank": 0, "system_dp_size": 1, "attn_cp_rank": 0, "pp_rank": 0, "rank_ip": "h", "rank_port": 1}
    for rank, device in enumerate([*devices, None]):
        said = {} if device is None else {"device": device}
        ranks.note({**place, "attn_tp_rank": rank, bootstrap_routes.RANK_VERSION: DECODE_PREFIX_VERSION, **said})
    server = object.__new__(CommonKVBootstrapServer)
    server.ranks, server.pp_size, server.attn_cp_size, server.decode_prefix_version = ranks, 1, 1, 1
    monkeypatch.setattr(server, "_all_have_come", lambda: True)
    answer = asyncio.run(server._capabilities())
    assert answer.get("devices", []) == devices
    manager = object.__new__(CommonKVManager)
    manager.server_args, manager.own_device = SimpleNamespace(disaggregation_decode_local_prefill=asked), "bb"
    manager.prefills = PrefillPeers(manager)
    manager.prefills.capabilities["here"] = parse_capabilities(answer)
    assert manager.drops("here") == (asked != "auto" or "bb" not in devices)
    assert not manager.drops("elsewhere")


@pytest.mark.parametrize(("stages", "cp_size", "fronts"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_what_a_prefill_says(monkeypatch, stages, cp_size, fronts):
    monkeypatch.setattr(server_args, "_global_server_args", SimpleNamespace(tokenizer_worker_num=fronts))
    server = object.__new__(CommonKVBootstrapServer)
    server.ranks, server.pp_size, server.attn_cp_size = bootstrap_routes.RegisteredRanks(), stages, cp_size
    monkeypatch.setattr(server, "_all_have_come", lambda: True)
    answer = asyncio.run(server._capabilities())
    assert answer["drops"] == (stages == cp_size == fronts == 1)
    names = [name for name in answer if name in ("version", "queued", "drops", "state", "prompts")]
    assert names == ["version", "queued", "drops", "state", "prompts"]


def test_prefill_hears_what_decode_computes(monkeypatch):
    monkeypatch.setattr(peer_calls, "_listeners", {})
    monkeypatch.setattr(peer_calls, "AGAIN_S", 0.2)
    prefill, rooms = manager(DisaggregationMode.PREFILL), []
    monkeypatch.setattr(ENGINE, "init_disaggregation", lambda self: None)
    prefill.init_disaggregation()
    prefill.computed.note = rooms.append

    async def hear(port: int) -> None:
        # With --skip-server-warmup there is no event loop before the first request.
        computed = peer_calls.tell(f"127.0.0.1:{port}", COMPUTED_ROUTE, [9])
        await asyncio.sleep(0.1)
        prefill.event_loop = asyncio.get_running_loop()
        await asyncio.wrap_future(computed)

    with bootstrap_server() as port:
        asyncio.run(asyncio.wait_for(hear(port), 60))
    assert rooms == [9]


def test_a_device_is_that_of_the_calling_thread_and_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    names = set()
    for index in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}"))
        names.add(device_names.own_device())
        assert device_names.own_device() in names
    assert len(names) == 2 and all(len(name) == 16 for name in names)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device_names.own_device() is None
