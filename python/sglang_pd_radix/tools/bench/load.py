"""The load generator: the engine's `sglang.bench_serving`, kept in one process for all runs of a benchmark.

Added here: prompts arrive as token ids over a pipe; each request's measured start, latency and inter-token times are
returned; and a trace is sent by its `get_request` with ``use_trace_timestamps``, which its command line offers for its
own trace format only.

One JSON object per line.
In: ``{"number", "key", "url", "concurrency", "encode", "requests": [{"ids", "answer", "arrival_s"}]}``; ``key`` is the
servers' API key, or null. With ``"rids": true`` each request has a rid of its own.
Out: ``{"outputs": [...]}`` or ``{"error": "..."}``. For ``{"number", "texts": [...]}``,
``{"ids": [...]}``: the token ids of each. Every line out has its job's ``number``:
a job that the parent has abandoned is finished all the same. What bench_serving prints goes to stderr.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def main(model: str) -> int:
    """Serve jobs from stdin until it closes."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job: dict[str, Any] = {}

    def tell(message: dict[str, Any]) -> None:
        pipe.write(json.dumps({"number": job.get("number"), **message}) + "\n")
        pipe.flush()

    import sglang.bench_serving as engine
    from sglang.benchmark.datasets import DATASET_MAPPING, DatasetRow
    from sglang.benchmark.utils import get_tokenizer

    tokenizer = get_tokenizer(model)
    outputs: list[Any] = []
    places: dict[int, int] = {}

    class Given:
        """The job's requests, as one of bench_serving's data sets."""

        @classmethod
        def from_args(cls, args: argparse.Namespace) -> Given:
            return cls()

        def load(self, tokenizer: Any, model_id: str | None = None) -> list[Any]:
            rows = []
            for i, request in enumerate(job["requests"]):
                due = request.get("arrival_s")
                ids = request["ids"]
                places[id(ids)] = i
                rows.append(DatasetRow(ids, len(ids), request["answer"], timestamp=None if due is None else 1000 * due))
            return rows

    DATASET_MAPPING["pd-radix"] = Given  # type: ignore[assignment]
    ask = engine.ASYNC_REQUEST_FUNCS["sglang"]
    send = engine.get_request

    async def asked(request_func_input: Any, pbar: Any = None) -> Any:
        place = places[id(request_func_input.prompt)]
        if job.get("rids"):
            # All requests share one dict.
            request_func_input.extra_request_body = request_func_input.extra_request_body | _named(job, place)
        output = outputs[place] = await ask(request_func_input, pbar)
        return output

    engine.ASYNC_REQUEST_FUNCS["sglang"] = asked
    engine.json = _Events()
    tell({"ready": True, "vocabulary": len(tokenizer)})
    for line in sys.stdin:
        job = json.loads(line)
        if "texts" in job:
            tell({"ids": [tokenizer.encode(text, add_special_tokens=False) for text in job["texts"]]})
            continue
        if job.get("key"):
            os.environ["OPENAI_API_KEY"] = job["key"]  # bench_serving's only source of the key
        requests = job["requests"]
        outputs[:] = [None] * len(requests)
        places.clear()
        timed = any(request.get("arrival_s") is not None for request in requests)
        engine.get_request = functools.partial(send, use_trace_timestamps=True) if timed else send
        wrong = _run(engine, _arguments(job, model), outputs)
        encode = tokenizer.encode if job.get("encode") else None
        tell({"error": wrong} if wrong else {"outputs": _all_told(job, outputs, encode)})
    return 0


def _named(job: dict[str, Any], place: int) -> dict[str, str]:
    """The rid of the request at ``place``, if the job has rids."""
    return {"rid": f"pd-radix-bench-{job['number']}-{place}"} if job.get("rids") else {}


def _all_told(job: dict[str, Any], outputs: list[Any], encode: Callable[..., list[int]] | None) -> list[dict[str, Any]]:
    """All answers; with rids, also each one's rid and clock offset to Unix time."""
    unix = {"unix_s": time.time() - time.perf_counter()} if job.get("rids") else {}
    return [{**_told(output, encode), **_named(job, place), **unix} for place, output in enumerate(outputs)]


def _run(engine: Any, arguments: argparse.Namespace, outputs: list[Any]) -> str | None:
    """Send all requests. Returns an error that ``outputs`` do not contain."""
    try:
        engine.run_benchmark(arguments)
    except Exception as error:  # noqa: BLE001 - the parent reports any error
        # It fails if all answers failed; then ``outputs`` have the reason.
        if not outputs or any(output is None or output.success for output in outputs):
            return f"{type(error).__name__}: {error}"
    return None


class _Events:
    """The `json` of bench_serving, which parses each line of an event stream as JSON; here comments count as none.

    smg sends one after 15 s without an event, so a request that waits longer would otherwise fail.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(json, name)

    @staticmethod
    def loads(text: str | bytes) -> Any:
        return {} if isinstance(text, str) and text.startswith(":") else json.loads(text)


def _told(output: Any, encode: Callable[..., list[int]] | None) -> dict[str, Any]:
    """One answer as bench_serving measured it, with its token ids if ``encode`` is given."""
    text = output.generated_text
    return {
        "text": text,
        "ids": encode(text, add_special_tokens=False) if encode else None,
        "tokens": output.output_len,
        "start_s": output.start_time,
        "ttft_s": output.ttft,
        "latency_s": output.latency,
        "itl_s": output.itl,
        "error": None if output.success else (output.error or "no answer").strip().splitlines()[-1],
    }


def _arguments(job: dict[str, Any], model: str) -> argparse.Namespace:
    """What bench_serving's own parser would make of

    ``--backend sglang --base-url URL --model MODEL --max-concurrency N --warmup-requests 0 --disable-tqdm``
    """
    return argparse.Namespace(
        backend="sglang",
        base_url=job["url"],
        host="127.0.0.1",
        port=None,
        ready_check_timeout_sec=0,
        dataset_name="pd-radix",
        dataset_path="",
        model=model,
        served_model_name=None,
        tokenizer=None,
        num_prompts=len(job["requests"]),
        request_rate=float("inf"),
        max_concurrency=job.get("concurrency"),
        seed=job.get("seed", 1),
        warmup_requests=0,
        disable_tqdm=True,
        disable_stream=False,
        disable_ignore_eos=False,
        extra_request_body=None,
        apply_chat_template=False,
        tokenize_prompt=False,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        lora_name=None,
        lora_request_distribution=None,
        lora_zipf_alpha=1.5,
        profile=False,
        pd_separated=True,
        flush_cache=False,
        plot_throughput=False,
        header=None,
        tag=None,
        output_file=os.devnull,
        output_details=False,
        sharegpt_output_len=None,
        random_input_len=None,
        random_output_len=None,
        random_range_ratio=None,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
