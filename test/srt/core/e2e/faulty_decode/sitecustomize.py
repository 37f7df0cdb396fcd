"""For decode workers with the flag that are wrong on purpose, so that a verdict on them has to be FAILED.

DECODE_FAULTS has their faults, comma-separated; each begins when the worker has had DECODE_FAULTS_AFTER requests.
"""

import os

import wrapt

from sglang_pd_radix.tools.verification.kv_record import SCHEDULER, when_made

FAULTS = {
    "keeps nothing": "no prompt and no answer enters the tree",
    "keeps no answers": "prompts alone enter it",
    "forgets": "whenever a request ends, all that nobody holds leaves it",
    "wrong token": "the first token of one request in WRONG_ONE_IN is another",
    "leaks descriptors": "one for each request",
    "wrong KV": "a token of one request in WRONG_ONE_IN has another's KV, in one layer",
}
WRONG_ONE_IN = int(os.environ.get("DECODE_FAULTS_ONE_IN", "50"))
chosen = set(filter(None, os.environ.get("DECODE_FAULTS", "").split(",")))
after = int(os.environ.get("DECODE_FAULTS_AFTER", "0"))
assert chosen <= set(FAULTS), chosen


def _spoil(scheduler):
    if not scheduler.server_args.disaggregation_decode_enable_radix_cache:
        return
    tree, queue = scheduler.tree_cache, scheduler.disagg_decode_transfer_queue
    finish, commit = tree.cache_finished_req, queue._commit_transfer_to_req
    accepts, leaked, count = tree.accepts, [], 0

    def commit_and_spoil(decode_req):
        nonlocal count
        arrived = commit(decode_req)
        if arrived:
            count += 1
            req = decode_req.req
            if count > after and "wrong token" in chosen and count % WRONG_ONE_IN == 0:
                req.output_ids[-1] ^= 1
            if count > after and "wrong KV" in chosen and count % WRONG_ONE_IN == 0:
                slots = scheduler.req_to_token_pool.req_to_token[req.req_pool_idx]
                keys = scheduler.token_to_kv_pool_allocator.get_kvcache().k_buffer[0]
                keys[slots[0]] = keys[slots[1]]
            if count > after and "leaks descriptors" in chosen:
                leaked.append(os.open(os.devnull, os.O_RDONLY))
        return arrived

    def finish_and_spoil(req, *args, **kwargs):
        if count > after and "keeps no answers" in chosen:
            kwargs["is_insert"] = False
        finish(req, *args, **kwargs)
        if count > after and "forgets" in chosen:
            tree.evict_shortfall(tree.evictable_size())

    tree.cache_finished_req, queue._commit_transfer_to_req = finish_and_spoil, commit_and_spoil
    tree.accepts = lambda req: accepts(req) and not (count > after and "keeps nothing" in chosen)


if chosen:
    wrapt.register_post_import_hook(lambda module: when_made(module.Scheduler, _spoil), SCHEDULER)
