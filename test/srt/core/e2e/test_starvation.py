"""A decode worker that is never done: many clients of one prefix, and a request that shares nothing with them."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pd import FLAG, TP2, Pair, words

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

CLIENTS, RUNNING = 40, 4


@pytest.fixture(scope="module", params=[1, 2], ids=["TP 1", "TP 2"])
def pair(request, clusters, model, backend):
    """A decode worker that has a place for `RUNNING` requests."""
    ranks = TP2 if request.param == 2 else []
    cluster = clusters.get(
        model,
        prefill=1,
        decode=1,
        prefill_args=[ranks],
        # In place of the common one.
        decode_args=[[FLAG, *ranks, "--max-running-requests", str(RUNNING)]],
        common_args=["--page-size", "16"],
        backend=backend,
    )
    return Pair(cluster, _workers=ThreadPoolExecutor(CLIENTS + 8))


def test_a_cold_request_is_served_while_hot_ones_keep_coming(pair):
    """With two ranks it had no first token after 100 s, in which 1065 others were served."""
    rnd = random.Random(5)
    hot = words(rnd, 256)
    pair(hot + words(rnd, 16), 4)
    stop, served = threading.Event(), []

    def client(n: int) -> None:
        own = random.Random(n)
        while not stop.is_set():
            served.append(pair(hot + words(own, 16), 8)["meta_info"]["id"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, n) for n in range(CLIENTS)]
        try:
            end = time.monotonic() + 60
            while len(served) < CLIENTS:
                assert time.monotonic() < end
                time.sleep(0.1)
            before = len(served)
            assert len(pair(words(rnd, 256), 4)["output_ids"]) == 4
            overtaken_by = len(served) - before
        finally:
            stop.set()
            for one in clients:
                one.result()
    # The bound, those that were served meanwhile, and those whose turn it was.
    assert overtaken_by <= 32 + 3 * CLIENTS, overtaken_by
    pair.check_idle()
