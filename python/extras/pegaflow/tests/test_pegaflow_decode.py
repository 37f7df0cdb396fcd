"""The decode worker's queues with a tree that saves to a real PegaFlow server and loads from it."""

from __future__ import annotations

import random
import time

import host_server
import pytest

pytestmark = pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing()))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = host_server.HostServer(tmp_path_factory.mktemp("pegaflow")).start()
    yield server
    server.kill()


@pytest.fixture
def world(server):
    """Makes decode workers, and closes their sessions."""
    import shared_kv
    import small_engine
    from decode_world import World
    from sglang.srt.mem_cache.pegaflow import session as pegaflow_session
    from sglang.srt.mem_cache.pegaflow.memory import kv_layout
    from sglang.srt.mem_cache.pegaflow.tree import PegaFlowDecodeRadixCache

    class PegaFlowWorld(World):
        """A decode rank with pages in the server. As `Scheduler` does it, each step begins with `advance`."""

        def __init__(self, namespace: str, **options):
            super().__init__(tree_type=PegaFlowDecodeRadixCache, **options)
            self.kv.k_buffer = [shared_kv.share(b.shape, b.dtype) for b in self.kv.k_buffer]
            self.kv.v_buffer = [shared_kv.share(b.shape, b.dtype) for b in self.kv.v_buffer]
            layout = kv_layout(self.kv, self.page_size)
            instance = f"world-{next(small_engine._numbers)}"
            self.session = pegaflow_session.PegaFlowSession(server.endpoint, instance, namespace, layout)
            self.saves = small_engine.record_saves(self.session)
            self.tree.attach(self.session)

        def step(self):
            self.tree.advance()
            return super().step()

        def check(self):
            if not self.tree.busy:
                super().check()

        def flush(self):
            weights = self.weights
            done = super().flush()
            self.weights = weights
            self.kv.k_buffer[0].fill_(-1)
            return done

        def settle(self):
            assert self.tree.drain()
            small_engine.wait_until_found(self.session, self.saves)
            self.check()

        def serve(self, prompt, max_new=4):
            """A whole request; how many tokens of it were not sent."""
            decode_req = self.arrive(prompt, max_new=max_new)
            receiver = decode_req.kv_receiver
            self.handshake(decode_req)
            end = time.monotonic() + 20
            while not receiver.asked:
                self.step()
                assert time.monotonic() < end
                time.sleep(0.001)
            self.complete(decode_req)
            self.step()
            while self.running:
                self.decode()
            self.settle()
            return receiver.prefix_len

    made = []

    def make(**options):
        made.append(PegaFlowWorld(options.pop("namespace", f"decode-{random.random()}"), **options))
        return made[-1]

    yield make
    for one in made:
        one.settle()
        one.session.close()


def test_what_was_evicted_is_loaded_and_not_sent(world):
    one = world(size=256, page_size=4)
    rnd = random.Random(1)
    prompts = [[rnd.randrange(200) for _ in range(61)] for _ in range(8)]
    for prompt in prompts:
        assert one.serve(prompt) == 0
    assert one.tree.evictable_size() < 8 * 60, "some of it has been evicted"
    for prompt in prompts:
        assert one.serve(prompt) == 60
    # The whole prompt: nothing but the first token is sent.
    assert one.serve(prompts[0][:60]) == 60


def test_what_another_worker_received(world):
    one, two = world(size=256, page_size=4, namespace="both"), world(size=256, page_size=4, namespace="both")
    prompt = list(range(80))
    one.serve(prompt, max_new=9)
    assert two.serve(prompt) == 80
    # With the answer of the first: 7, then 5 eight times.
    assert two.serve(prompt + [7] + [5] * 7 + [1, 2, 3]) == 88


def test_who_loads_is_passed(world):
    """It has not shaken hands to the queue; another request goes first."""
    one = world(size=256, page_size=4)
    prompt, other = list(range(80)), list(range(100, 140))
    one.serve(prompt)
    one.tree.reset(), one.allocator.clear()
    # An answer that does not come.
    one.session.ask = lambda lookup: None
    waiting = one.arrive(prompt)
    one.session.ask = type(one.session).ask.__get__(one.session)
    one.handshake(waiting)
    passing = one.arrive(other)
    one.handshake(passing)
    while not passing.kv_receiver.asked:
        one.step()
    assert not waiting.kv_receiver.asked and waiting in one.queue.queue
    one.complete(passing)
    # Now it comes.
    one.session.ask(one.tree.prefetches.open[0].lookup)
    while not waiting.kv_receiver.asked:
        one.step()
    assert waiting.kv_receiver.prefix_len == 80
    one.complete(waiting)
    while one.running or one.transfer.queue:
        one.step()
        one.decode()


@pytest.mark.parametrize("seed", range(4))
def test_anything(world, seed):
    """Requests with shared prefixes in a small pool, that come, fail, are retracted and end as it happens.

    `World.check`: no slot is lost or held twice, and none of a request or of the tree holds another prefix's KV.
    """
    rnd = random.Random(seed)
    one = world(size=rnd.choice([64, 128]), page_size=rnd.choice([1, 4]))
    stems = [[rnd.randrange(200) for _ in range(24)] for _ in range(4)]
    for _ in range(400):
        roll = rnd.random()
        if roll < 0.2 and len(one.queue.queue) < 6:
            stem = rnd.choice(stems)
            tail = [rnd.randrange(3) for _ in range(rnd.randrange(8))]
            key = rnd.choice([None, None, "salt"])
            one.handshake(one.arrive(stem[: rnd.randrange(1, 25)] + tail, extra_key=key))
        elif roll < 0.4 and one.transfer.queue:
            moving = rnd.choice(one.transfer.queue)
            if moving.kv_receiver.asked and moving.kv_receiver.state not in (0, 4):
                one.complete(moving)
        elif roll < 0.45 and one.queue.queue:
            rnd.choice(one.queue.queue).kv_receiver.abort()
        elif roll < 0.48 and len(one.running) > 1:
            one.retract(rnd.choice(one.running))
        elif roll < 0.7:
            one.decode()
        elif roll < 0.72 and one.idle():
            assert one.tree.drain()
            one.flush()
        else:
            one.step()
            if rnd.random() < 0.3:
                time.sleep(0.002)
        one.check()
    for decode_req in list(one.queue.queue):
        decode_req.kv_receiver.abort()
    end = time.monotonic() + 20
    while not one.idle() or one.queue.retracted_queue:
        assert time.monotonic() < end
        for moving in one.transfer.queue:
            if moving.kv_receiver.asked and moving.kv_receiver.state not in (0, 4):
                one.complete(moving)
        one.step()
        one.decode()
        for gone in list(one.transfer.quarantine):
            gone.kv_receiver.quiet = True
    one.settle()
    # How much of the life was loaded is the server's pace. What it has left loads for certain.
    one.serve(stems[0])
    one.tree.reset(), one.allocator.clear()
    before = one.session.counters.loaded
    assert one.serve(stems[0]) == 24
    assert one.session.counters.loaded > before
