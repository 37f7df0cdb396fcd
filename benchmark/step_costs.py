"""Thread time of a decode worker's step in the states in which it should cost next to nothing, or no more than off.

    python benchmark/step_costs.py [--states NAME,...] [--runs N]

Real schedulers (`host_worker.py`), one in a process, whose model takes no time. Prints a Markdown table: the median
step, and where requests arrive together the longest. What they do in the same states, `test_step_costs.py` counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from host_worker import Ends, Worker
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.managers.schedule_batch import Req

from sglang_pd_radix.tools.make_model import ModelShape, make_model

SIDES: dict[str, list[str]] = {"off": [], "on": ["--disaggregation-decode-enable-radix-cache"]}
# Rows for requests; who runs in most states; who waits; tokens of the pool and of a page; an answer that does not end.
ROWS, RUN, WAIT, POOL, PAGE, LONG = 64, 32, 256, 1_400_000, 16, 10**6
# Long prompts: what is held of each, what is not, and how many arrive.
HELD, OWN, TOGETHER = 50_000, 4500, 24
# The longest prompt, and the most tokens of a request.
LENGTH, CONTEXT = 128_000, 150_000


class StepWorker(Worker):
    """A real worker that is brought into a state. late: whether the prefill of those that come does not answer."""

    late, turns = False, 0
    running = property(lambda self: len(self.scheduler.running_batch.reqs))
    waiting = property(lambda self: len(self.queue.queue))
    # Without the flag nobody does, nor without the extra prefix_order.
    follows = property(lambda self: self.queue.has_radix and hasattr(self.queue.policy, "wait_limit"))

    def _enqueue(self, req: Req) -> DecodeRequest:
        made = super()._enqueue(req)
        if self.late:
            made.kv_receiver.send_metadata = lambda *args, **kwargs: None
        return made

    def add(self, answers: Iterable[int], shared: int = 512, own: int = 64, prefixes: int = 4) -> None:
        """Requests with answers of these lengths arrive, of one of the shared prefixes each."""
        self.job = {"stream": False, "shared": shared, "own": own, "prefixes": prefixes}
        for answer in answers:
            self._add(answer)

    def follow(self, answers: Iterable[int]) -> None:
        """Requests arrive, and behind them others that wait for the transfer of the first of these."""
        self.add(answers)
        self.late = True
        if self.follows or not self.queue.has_radix:
            self.add([LONG] * (WAIT + 1), shared=8192, own=32, prefixes=1)

    def add_long(self) -> None:
        """Prompts of `LENGTH` tokens in each queue: 4 run, 6 are in transfer, and others wait for memory."""
        self.add([LONG] * 4, shared=0, own=LENGTH)
        self.late = True
        self.add([LONG] * TOGETHER, shared=0, own=LENGTH)

    def next_turn(self, grows: int = 64) -> None:
        """The next turn of a conversation arrives when the one before has ended: a tree path with a node for each."""
        if all(req.finished() for req in self.live):
            self.turns = self.turns + 1 if self.live else 0
            self.live = []
            self.add([2], shared=HELD + grows * self.turns, own=0, prefixes=1)

    def replace_ended(self) -> None:
        """One arrives for each that has ended."""
        gone = [req for req in self.live if req.finished()]
        self.live = [req for req in self.live if not req.finished()]
        self.add([RUN] * len(gone))

    def play(self, state: State, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        """Bring this worker into ``state``, have its steps begin and end, and end all requests.

        Requests arrive between steps: what that takes is not looked at.
        """
        self.live, self.late = [], False
        if self.follows:
            # However slow the machine, nobody gives up waiting for another's transfer.
            self.queue.policy.wait_limit.least = float(LONG)
        turn, patience = -state.warm - 1, iter(range(20_000, -1, -1))
        state.begin(self)

        def between() -> list:
            nonlocal turn
            assert next(patience), "the worker does not come into this state"
            if turn >= -state.warm or state.ready(self):
                if turn >= 0:
                    ends()
                turn += 1
                if turn == state.steps:
                    raise Ends
                state.between(self, turn)
                if turn >= 0:
                    begins()
            return []

        self.scheduler.recv_requests = between
        try:
            self.scheduler.event_loop_overlap_disagg_decode()
        except Ends:
            pass
        assert state.ready(self), f"the worker did not stay in this state: {self.running} run, {self.waiting} wait"
        self._end()


class State(NamedTuple):
    """begin: requests arrive. ready: whether the state is reached, and holds. between: called before each step.

    warm, steps: how many are left out, and looked at.
    """

    begin: Callable[[StepWorker], None]
    ready: Callable[[StepWorker], bool]
    between: Callable[[StepWorker, int], None] = lambda worker, step: None
    warm: int = 8
    steps: int = 32


STATES = {
    "idle": State(lambda w: w.add([LONG] * RUN), lambda w: w.running == RUN),
    "no memory": State(
        lambda w: w.add([LONG] * 2 * RUN, own=POOL // RUN - 1024 - PAGE), lambda w: w.running == RUN == w.waiting
    ),
    "no row": State(lambda w: w.add([LONG] * 2 * ROWS), lambda w: w.running == ROWS == w.waiting),
    "long prompts": State(lambda w: w.add_long(), lambda w: w.running == 4 and w.waiting > 8),
    "following": State(lambda w: w.follow([LONG] * RUN), lambda w: w.waiting == WAIT or not w.follows),
    "ends": State(lambda w: w.follow(range(1, 61)), lambda w: w.waiting == WAIT or not w.follows, warm=2),
    "turnover": State(
        lambda w: w.add(range(1, RUN + 1)), lambda w: w.running > RUN // 2, lambda w, step: w.replace_ended(), 2 * RUN
    ),
    "turnover without a row": State(
        lambda w: w.add([n % RUN + 1 for n in range(2 * ROWS)]),
        lambda w: w.waiting > RUN,
        lambda w, step: w.replace_ended(),
        warm=2 * RUN,
    ),
    "together": State(
        lambda w: w.add([LONG] * 4, HELD, OWN),
        lambda w: w.running >= 4,
        lambda w, step: w.add([] if step else [4] * TOGETHER, HELD, OWN),
        steps=8,
    ),
    "first turns": State(lambda w: w.next_turn(), lambda w: True, lambda w, step: w.next_turn(), warm=16),
    # At the end, hundreds are on one path.
    "late turns": State(
        lambda w: w.next_turn(), lambda w: not 0 < w.turns < 300, lambda w, step: w.next_turn(), warm=1500
    ),
    "one token": State(
        lambda w: w.add([LONG] * 4),
        lambda w: w.running == 4,
        lambda w, step: w.add([] if step else [1] * 16, own=72),
        steps=8,
    ),
}


def make_worker(side: str) -> StepWorker:
    """The worker of this process: there is one in each, as the engine's groups of ranks are the process's own."""
    shape = ModelShape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    model = Path(make_model(Path(tempfile.mkdtemp()) / "model", shape))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    line = f"--model-path {model} --device cpu --dtype float32 --max-total-tokens {POOL} --page-size {PAGE}"
    line += f" --max-running-requests {ROWS} --context-length {CONTEXT}"
    line += " --disaggregation-mode decode --disaggregation-transfer-backend nixl"
    return StepWorker([*line.split(), *SIDES[side]])


def times(worker: StepWorker, state: State) -> list[float]:
    """Milliseconds of the thread in each step."""
    at: list[float] = []
    worker.play(state, *[lambda: at.append(time.thread_time())] * 2)
    return [1000 * (end - begin) for begin, end in zip(at[::2], at[1::2], strict=True)]


def tell(side: str, names: Iterable[str], measure: Callable[[StepWorker, State], list]) -> None:
    """Print what is measured in each state, and end this process."""
    worker = make_worker(side)
    for name in names:
        print("RESULT", json.dumps([name, measure(worker, STATES[name])]), flush=True)
    os._exit(0)


def ask(*line: str) -> dict[str, list[float]]:
    """What is measured in another process, by state."""
    said = subprocess.run([sys.executable, __file__, *line], capture_output=True, text=True, timeout=600, check=True)
    return dict(json.loads(text[7:]) for text in said.stdout.splitlines() if text.startswith("RESULT "))


def main() -> None:
    """Measure both sides in turns and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--states", default=list(STATES), type=lambda text: text.split(","), metavar="NAME,...")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each side, in turns (default: 3)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        tell(args.side, args.states, times)
    asked = "--states", ",".join(args.states)
    runs = [(side, ask("--side", side, *asked)) for _ in range(args.runs) for side in SIDES]
    print("| state | ms off | ms on | on / off |\n|---|---|---|---|")
    for name in args.states:
        figure = statistics.median if STATES[name].steps > 8 else max
        off, on = (statistics.median(figure(said[name]) for own, said in runs if own == side) for side in SIDES)
        print(f"| {name} | {off:.2f} | {on:.2f} | {on / off:.2f} |")


if __name__ == "__main__":
    main()
