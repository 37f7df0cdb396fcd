"""One request followed by its spans, which --enable-trace of engine and gateway sends to an OpenTelemetry collector."""

from __future__ import annotations

import random

import pytest
import requests
from pd import FLAG, Pair, words

pytest.importorskip("opentelemetry.proto.collector.trace.v1", reason="pip install 'sglang-pd-radix[trace]'")

from trace_collector import Span, collector  # noqa: E402

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

# A host tier, so that all causes of a hit are there; and the second worker computes short remainders.
HOST = ["--enable-hierarchical-cache", "--hicache-ratio", "4"]
SMALL = ["--max-total-tokens", "2048"]
LOCAL = ["--disaggregation-decode-local-prefill", "200"]

# The stages of a request, by worker, in the order in which they begin.
PREFILL = ["prefill_prepare", "prefill_bootstrap", "prefill_waiting", "prefill_forward", "prefill_transfer_kv_cache"]
DECODE = ["decode_prepare", "decode_bootstrap", "decode_transferred", "decode_waiting", "decode_forward"]


@pytest.fixture(scope="module")
def seen():
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(clusters, model, seen):
    traced = ["--enable-trace", "--otlp-traces-endpoint", seen.endpoint]
    yield clusters.get(
        model,
        decode=2,
        decode_args=[[FLAG, *HOST, *SMALL], [FLAG, *LOCAL]],
        common_args=["--page-size", "16", *traced],
        router_args=[*traced, "--log-level", "info"],
        backend="nixl",
    )
    clusters.stop()


def scheduler_of(spans: list[Span], trace: str, stage: str) -> dict[str, Span]:
    """The stages of one scheduler of a request, which has one named ``stage``; chunks and tokens left out."""
    anchor = next(span for span in spans if span.trace == trace and span.name == stage)
    mine = [span for span in spans if span.trace == trace and span.parent == anchor.parent]
    return {span.name: span for span in sorted(mine, key=lambda span: span.start)}


def life(seen, room: int) -> tuple[dict[str, Span], dict[str, Span]]:
    """What prefill and decode told of a room, when both have told all."""

    def traces(spans: list[Span]) -> set[str]:
        return {span.trace for span in spans if span.attributes.get("bootstrap_room") == hex(room)}

    def all_told(spans: list[Span]) -> bool:
        mine = [span for span in spans if span.trace in traces(spans)]
        roots = [span for span in mine if "bootstrap_room" in span.attributes]
        return len(roots) == 2 and any(span.name == "decode_forward" for span in mine)

    spans = seen.wait(all_told)
    found: dict[str, dict[str, Span]] = {"prefill_prepare": {}, "decode_prepare": {}}
    for trace in traces(spans):
        for stage in found:
            if any(span.trace == trace and span.name == stage for span in spans):
                found[stage] = scheduler_of(spans, trace, stage)
    return found["prefill_prepare"], found["decode_prepare"]


def ask(pair: Pair, seen, ids: list[int], max_new: int = 4) -> tuple[dict, dict[str, Span], dict[str, Span]]:
    room = random.randrange(1, 2**62)
    reply = pair(ids, max_new, bootstrap_room=room)
    return reply, *life(seen, room)


def admitted(stages: dict[str, Span]) -> dict:
    """What is told of an admission, within the span of the handshake."""
    (event,) = [event for event in stages["decode_bootstrap"].events if event.name == "admitted"]
    assert stages["decode_bootstrap"].start <= event.at <= stages["decode_bootstrap"].end
    return event.attributes


def in_order(stages: dict[str, Span], names: list[str]) -> None:
    """Each begins when the one before it ends at the earliest, and none takes longer than the test."""
    assert [name for name in stages if name in names] == names
    for one, after in zip(names, names[1:], strict=False):
        assert stages[one].start <= stages[one].end <= stages[after].start, (one, after)
    assert all(span.end - span.start < 60e9 for span in stages.values())


def test_from_prompt_to_answer(cluster, seen):
    """Every stage of both workers is a span, and what decode held is told when it is admitted."""
    pair, ids = Pair(cluster), words(random.Random(1), 160)
    _, prefill, decode = ask(pair, seen, ids)
    in_order(prefill, PREFILL)
    in_order(decode, DECODE)
    assert admitted(decode) == {"held_tokens": 0, "host_tokens": 0, "computed_here": False, "followed_s": 0.0}
    # Decode asks before prefill can send. (Prefill sees the end of it in a turn of its loop, decode maybe before.)
    assert decode["decode_bootstrap"].end <= prefill["prefill_transfer_kv_cache"].end
    _, _, decode = ask(pair, seen, ids)
    assert admitted(decode)["held_tokens"] == 160


def test_what_came_from_host_memory_is_told(cluster, seen):
    pair, rnd = Pair(cluster), random.Random(2)
    ids = words(rnd, 320)
    ask(pair, seen, ids)
    for _ in range(8):
        pair(words(rnd, 320), 4)
    reply, _, decode = ask(pair, seen, ids)
    told = admitted(decode)
    assert (told["held_tokens"], told["host_tokens"]) == (0, 320)
    assert reply["meta_info"]["cached_tokens_details"]["decode_host"] == 320


def test_a_prompt_that_decode_computes(cluster, seen):
    """Its own computation is a span within that of decode, and no step is taken for as long as the clock has run."""
    pair, ids = Pair(cluster, decode=1), words(random.Random(3), 160)
    ask(pair, seen, ids)
    room = random.randrange(1, 2**62)
    ids = ids + words(random.Random(4), 40)
    reply = pair(ids, 8, bootstrap_room=room)
    assert reply["meta_info"]["cached_tokens_details"]["decode_computed"] == 40
    _, decode = life(seen, room)
    assert admitted(decode)["computed_here"] is True
    in_order(decode, DECODE)
    forward = decode["decode_forward"]
    inside = [span for span in seen.spans() if span.parent == forward.span]
    (computed,) = [span for span in inside if span.name == "prefill_forward"]
    loops = [span for span in inside if span.name == "decode_loop"]
    assert len(loops) == 7
    assert all(forward.start <= span.start <= span.end <= forward.end for span in inside)
    assert all(computed.end <= span.start + 1000 for span in loops)


def test_through_the_gateway(cluster, seen):
    """The client's trace has what the gateway and both workers did: smg hands its traceparent on."""
    client = "ab" * 16
    # Longer than what the second decode worker would compute itself: the gateway may choose either.
    reply = requests.post(
        cluster.router_url + "/generate",
        json={"input_ids": words(random.Random(5), 320), "sampling_params": {"max_new_tokens": 4}},
        headers={"traceparent": f"00-{client}-{'cd' * 8}-01"},
        timeout=60,
    )
    reply.raise_for_status()

    def names(spans: list[Span]) -> set[str]:
        return {span.name for span in spans if span.trace == client}

    def gateway(spans: list[Span]) -> list[Span]:
        return [span for span in spans if span.trace == client and span.service == "smg"]

    # Each process sends its own, when it likes.
    spans = seen.wait(lambda spans: {*PREFILL, *DECODE} <= names(spans) and bool(gateway(spans)))
    assert {name.split(" Req")[0] for name in names(spans) if " Req" in name} == {"prefill", "decode"}
    (whole,) = gateway(spans)
    assert (whole.parent, whole.attributes["path"]) == ("cd" * 8, "/generate")
    stages = [span for span in spans if span.trace == client and span.name in (*PREFILL, *DECODE)]
    assert whole.start <= min(span.start for span in stages)


def test_nothing_was_told_twice_or_left_open(cluster, seen):
    """The engine warns of a span that is closed under another name, and closes what nobody has."""
    for process in cluster.processes:
        log = process.log_path.read_text(errors="replace")
        assert "Slice name mismatch" not in log and "No matching with the SLICE_START" not in log, process.name
    left_open = [span for span in seen.spans() if "unclosed" in str(span.attributes.get("reason"))]
    assert not left_open, left_open
