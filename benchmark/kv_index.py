"""Does a router's index that listens to a decode worker's KV events know what its tree holds?

The index is another project's: Dynamo's, as its package `ai-dynamo-runtime` has it (`python -m dynamo.indexer --port
8090`, best in an environment of its own). The tree is the real one on a pool of numbers, and its events go through the
engine's own publisher. After each few requests that come and go the index is asked, by tokens, for the longest prefix
that it knows of some prompts, and the tree too.

    python benchmark/kv_index.py --indexer http://127.0.0.1:8090
    python benchmark/kv_index.py --indexer http://127.0.0.1:8090 --keys   # some prompts have an extra_key

Right: questions to which both say the same. More, less: the index took the worker to hold more, or less, than it does.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import time
import uuid
import warnings
from collections import Counter
from typing import Any

# Before the engine is imported, which warns of what a CPU host lacks.
warnings.simplefilter("ignore")

import requests  # noqa: E402
import torch  # noqa: E402
from decode_worker import DecodeWorker  # noqa: E402
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams  # noqa: E402
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

INSTANCE = 7


class Index:
    """Dynamo's indexer: one worker is registered, under a model name of its own."""

    def __init__(self, url: str, page: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.url, self.model = url, f"kv-index-{uuid.uuid4()}"
        self._post("register", instance_id=INSTANCE, endpoint=self.endpoint, block_size=page)

    def held(self, tokens: list[int], key: str | None = None) -> int:
        """Tokens of a prompt that it takes the worker to hold. key: asked for as a salt."""
        scores = self._post("query", token_ids=tokens, **({"cache_salt": key} if key else {}))["scores"]
        return max(scores.get(str(INSTANCE), {"": 0}).values())

    def close(self) -> None:
        self._post("unregister", instance_id=INSTANCE)

    def _post(self, path: str, **body: Any) -> Any:
        reply = requests.post(f"{self.url}/{path}", json={"model_name": self.model, **body}, timeout=10)
        reply.raise_for_status()
        return reply.json()


class Publisher:
    """The events of one tree, by the engine's publisher."""

    def __init__(self, tree: DecodeRadixCache, endpoint: str):
        self._tree = tree
        self._out = ZmqEventPublisher(0, endpoint=endpoint.replace("127.0.0.1", "*"))

    def publish(self) -> int:
        """How many there were."""
        events = self._tree.take_events()
        if events:
            self._out.publish(KVEventBatch(ts=time.time(), events=events))
        return len(events)

    def close(self) -> None:
        self._out.shutdown()


def hold(worker: DecodeWorker, tokens: list[int], key: str | None) -> None:
    """A prompt comes into the tree, in whole pages; as much as it needs is evicted."""
    tree, page = worker.tree, worker.tree.page_size
    assert isinstance(tree, DecodeRadixCache)
    whole = tokens[: len(tokens) // page * page]
    parts, node = tree.lock_prefix(tree.peek(whole, key))
    need = len(whole) - sum(len(part) for part in parts)
    if need:
        if need > worker.allocator.available_size():
            tree.evict_shortfall(need - worker.allocator.available_size())
        new = worker.allocator.alloc(need)
        assert new is not None
        tree.insert(InsertParams(key=RadixKey(whole, key), value=torch.cat([*parts, new])))
    tree.dec_lock_ref(node)


def wait_until_heard(index: Index, prompt: list[int]) -> None:
    """Until the index knows of a prompt of whole pages that has just come. Raises AssertionError after 10 s."""
    end = time.monotonic() + 10
    while index.held(prompt) < len(prompt):
        assert time.monotonic() < end, "the index has heard nothing"
        time.sleep(0.05)


def live(url: str, rounds: int, page: int, keys: list[str | None], seed: int = 0) -> Counter[str]:
    """Questions by their outcome, of a tree into which ``rounds`` x 20 prompts come."""
    rnd = random.Random(f"kv-index/{seed}")
    worker = DecodeWorker(6000, page, max_reqs=8, max_len=8, reserved=0)
    tree, index = worker.tree, Index(url, page)
    assert isinstance(tree, DecodeRadixCache)
    publisher = Publisher(tree, index.endpoint)
    tree.enable_kv_cache_events = True
    # The listener connects by itself, and what is said before that is not heard.
    time.sleep(2)
    tree.reset()
    prompts: list[tuple[list[int], str | None]] = [([], None)]
    found: Counter[str] = Counter()
    for number in range(rounds):
        for _ in range(20):
            before, key = rnd.choice(prompts[-60:])
            prompt = before[: rnd.randrange(len(before) + 1)] + [
                rnd.randrange(1, 30_000) for _ in range(rnd.randrange(8, 300))
            ]
            if not before:
                key = rnd.choice(keys)
            prompts.append((prompt, key))
            hold(worker, prompt, key)
            found["events"] += publisher.publish()
        if number % 5 == 4:
            tree.evict_shortfall(tree.evictable_size() // 3)
            found["events"] += publisher.publish()
        mark = [30_000 + number, *(rnd.randrange(1, 30_000) for _ in range(2 * page - 1))]
        hold(worker, mark, None)
        found["events"] += publisher.publish()
        wait_until_heard(index, mark)
        for prompt, key in rnd.sample(prompts, min(40, len(prompts))):
            said, held = index.held(prompt, key), tree.peek(prompt, key).length
            found["right" if said == held else "more" if said > held else "less"] += 1
            found["of which nothing"] += held == 0 == said
    publisher.close()
    index.close()
    return found


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--indexer", default="http://127.0.0.1:8090", help="where it listens")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--pages", default="1,16,64", help="page sizes")
    parser.add_argument("--keys", action="store_true", help="give two of three prompts an extra_key")
    args = parser.parse_args()
    for page in map(int, args.pages.split(",")):
        found = live(args.indexer, args.rounds, page, [None, "a", "b"] if args.keys else [None])
        print(f"pages of {page}: " + ", ".join(f"{name} {count}" for name, count in sorted(found.items())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
