"""What a storage below host memory is told: options, names of pages and folders; and the engine's routes for it."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.host_tier import storage_scheduler
from sglang.srt.mem_cache.host_tier.storage import add_storage
from sglang.srt.mem_cache.host_tier.storage_fetches import Limits
from sglang.srt.mem_cache.host_tier.storage_keys import first_hash, model_folder, page_names, rank_folder, weights_id
from sglang.srt.mem_cache.host_tier.storage_options import options_of, read_options
from sglang.srt.mem_cache.pegaflow.pages import model_namespace
from storage_world import StorageWorld
from test_traps import tokens


def options(path: Any, **given: Any) -> Any:
    args = {
        "model_path": str(path),
        "revision": None,
        "load_format": "auto",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "page_size": 16,
        "hicache_mem_layout": "layer_first",
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
        "speculative_draft_model_quantization": None,
        "speculative_draft_load_format": None,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": None,
        "hicache_storage_prefetch_policy": "best_effort",
        "tp_size": 1,
        "pegaflow_namespace": "",
    }
    return SimpleNamespace(**{**args, **given})


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    os.utime(path / "model.safetensors", (1, 1))
    return path


# ---- names ----


def test_pages_are_named_by_all_that_comes_before():
    first = page_names(tokens(1, 16), 4, first_hash(None))
    assert len(set(first)) == 4 and page_names(tokens(1, 18), 4, first_hash(None)) == first
    assert page_names(tokens(1, 16)[8:], 4, first[1]) == first[2:]
    other = page_names(tokens(1, 8) + tokens(50, 8), 4, first_hash(None))
    assert other[:2] == first[:2] and not set(other[2:]) & set(first)
    for key in ("", "a", "b", "\ud800"):
        assert not set(page_names(tokens(1, 16), 4, first_hash(key))) & set(first)
    pairs = list(zip(tokens(1, 16), tokens(2, 16), strict=True))
    assert len(page_names(pairs, 4, first_hash(None))) == 4
    assert page_names(pairs, 4, first_hash(None)) != page_names(tokens(1, 16), 4, first_hash(None))


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"page_size": 32},
        {"hicache_mem_layout": "page_first"},
        {"quantization": "fp8"},
        {"load_format": "dummy", "random_seed": 1},
    ],
)
def test_what_kv_depends_on_is_in_the_folder(model, given):
    name = model_folder(options(model), None)
    assert name == model_folder(options(model), None) and name.startswith("model-")
    assert model_folder(options(model, **given), None) != name


def test_other_weights_have_another_folder(model, tmp_path):
    name = model_folder(options(model), None)
    os.utime(model / "model.safetensors", (2, 2))
    assert model_folder(options(model), None) != name
    # What the operator says of them counts.
    named = model_folder(options(model), "llama-1")
    os.utime(model / "model.safetensors", (3, 3))
    assert model_folder(options(model), "llama-1") == named != model_folder(options(model), "llama-2")
    with pytest.raises(ValueError, match="--hicache-storage-backend cannot tell which weights .*: download"):
        weights_id(str(tmp_path / "nothing"), None)


@pytest.fixture
def experts(tmp_path):
    """Files of a model's experts for KTransformers."""
    path = tmp_path / "experts"
    path.mkdir()
    (path / "experts.safetensors").write_bytes(b"weights")
    os.utime(path / "experts.safetensors", (1, 1))
    return path


@pytest.mark.parametrize(
    "given",
    [
        {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "/a"}'},
        {"custom_weight_loader": ["m.f"]},
        {"modelopt_checkpoint_restore_path": "/r"},
        {"modelopt_quant": "fp8"},
        {"quantize_and_serve": True},
        {"rl_quant_profile": "/p"},
        {"kt_weight_path": "{experts}"},
    ],
)
def test_options_that_change_weights_are_in_the_folder_and_in_a_namespace_of_pegaflow(model, experts, given):
    given = {name: str(experts) if value == "{experts}" else value for name, value in given.items()}
    for named in (lambda args: model_folder(args, None), model_namespace):
        assert named(options(model, **given)) != named(options(model))


def test_of_experts_apart_from_the_model_files_and_options_count(model, experts):
    kt = {"kt_weight_path": str(experts), "kt_method": "AMXINT4", "kt_num_gpu_experts": 0}
    given = [kt, *({**kt, name: value} for name, value in (("kt_method", "AMXINT8"), ("kt_num_gpu_experts", 1)))]
    given.append({**kt, "kt_max_deferred_experts_per_token": 1})
    for named in (lambda args: model_folder(args, None), model_namespace):
        names = [named(options(model, **one)) for one in given]
        os.utime(experts / "experts.safetensors", (2, 2))
        names.append(named(options(model, **kt)))
        assert len(set(names)) == len(names)
        os.utime(experts / "experts.safetensors", (1, 1))
    # Without a path the engine looks at none of them; and a name is of these weights too.
    assert model_namespace(options(model, kt_num_gpu_experts=1)) == model_namespace(options(model))
    named = model_folder(options(model, **kt), "name")
    os.utime(experts / "experts.safetensors", (2, 2))
    assert model_folder(options(model, **kt), "name") == named != model_folder(options(model), "name")


def test_what_is_not_set_changes_no_name_of_pegaflow(model):
    """What a server has of an ordinary engine is found by one that has these options."""
    unset = {"model_loader_extra_config": "{}", "custom_weight_loader": [], "modelopt_quant": None, "kt_method": None}
    assert model_namespace(options(model, **unset, quantize_and_serve=False)) == model_namespace(options(model))


def test_how_weights_are_loaded_is_in_no_name_of_pegaflow(model):
    """With more threads they are the same."""

    def named(given: str) -> str:
        return model_namespace(options(model, model_loader_extra_config=given))

    threads = '{"enable_multithread_load": true, "num_threads": 8'
    assert named(threads + "}") == named(" { } ") == named("") == model_namespace(options(model))
    assert named(threads + ', "pattern": "a"}') == named('{"pattern":"a"}')
    assert len({named(text) for text in ("{}", '{"pattern":"a"}', '{"pattern":"b"}')}) == 3
    # What the loader refuses, or reads in another way, counts as it is.
    assert len({named(text) for text in ("{}", "{", "[]", "null", "[1]")}) == 5


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--model-path", {"model_path": "no/such"}),
        ("--kt-weight-path", {"kt_weight_path": "no/such"}),
        ("--speculative-draft-model-path", {"speculative_algorithm": "S", "speculative_draft_model_path": "no/such"}),
    ],
)
def test_where_files_are_missing_the_option_that_names_them_is_told(model, option, given):
    with pytest.raises(ValueError, match=f"'no/such' has, .* or give a directory as {option}\\."):
        model_folder(options(model, **given), None)
    if "speculative_algorithm" not in given:
        with pytest.raises(ValueError, match=f"'no/such' has, .* or give a directory as {option}\\."):
            model_namespace(options(model, **given))


def test_a_draft_has_a_part_in_the_name(model, tmp_path):
    """Its KV is in the same files."""
    drafts = [tmp_path / name for name in ("draft", "other")]
    for draft in drafts:
        draft.mkdir()
        (draft / "model.safetensors").write_bytes(draft.name.encode())
    eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(drafts[0])}
    given = [
        {},
        eagle,
        {**eagle, "speculative_algorithm": "EAGLE3"},
        {**eagle, "speculative_draft_model_path": str(drafts[1])},
        {**eagle, "speculative_draft_model_quantization": "fp8"},
    ]
    for weights in (None, "name"):
        assert len({model_folder(options(model, **one), weights) for one in given}) == len(given)
    # A name is of both.
    named = model_folder(options(model, **eagle), "name")
    os.utime(drafts[0] / "model.safetensors", (7, 7))
    os.utime(model / "model.safetensors", (7, 7))
    assert model_folder(options(model, **eagle), "name") == named


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"load_format": "remote"}, "--load-format remote"),
        (
            # The engine has put it in the place of the model's.
            {"load_format": "auto", "speculative_algorithm": "EAGLE", "speculative_draft_load_format": "auto"},
            "--speculative-draft-load-format auto",
        ),
    ],
)
def test_weights_that_are_not_known_from_files_are_to_be_named(model, given, says):
    args = options(model, **{"speculative_draft_model_path": str(model), **given})
    with pytest.raises(ValueError, match=f"with {says} the weights are others than the files'"):
        model_folder(args, None)
    assert model_folder(args, "name")


def test_what_a_hub_has_by_its_digest_is_the_same_on_all_hosts(tmp_path):
    ids = []
    for host, digest in (("a", "1234"), ("b", "1234"), ("c", "5678")):
        blobs, snapshot = tmp_path / host / "blobs", tmp_path / host / "snapshots" / "main"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / digest).write_bytes(b"weights")
        os.utime(blobs / digest, (len(ids), len(ids)))
        (snapshot / "model.safetensors").symlink_to(blobs / digest)
        ids.append(weights_id(str(snapshot), None))
    assert ids[0] == ids[1] != ids[2]


def test_ranks_and_shapes_have_folders_of_their_own():
    made_of = [("MHATokenToKVPoolHost", "layer_first", "torch.float32", (2, 1, 4, 1, 1))]
    names = {
        rank_folder("m", made_of, 0, 1),
        rank_folder("m", made_of, 0, 2),
        rank_folder("m", made_of, 1, 2),
        rank_folder("m", [(*made_of[0][:3], (2, 1, 4, 2, 1))], 0, 1),
        rank_folder("n", made_of, 0, 1),
    }
    assert len(names) == 5
    # MLA: all ranks of all sizes have the same.
    assert rank_folder("m", made_of, None, 2) == rank_folder("m", made_of, None, 4)


# ---- options ----


def test_the_engines_limits(tmp_path):
    assert read_options("file", None, "best_effort") == (Limits(256, 1.0, 0.25), None, None)
    given = (
        '{"prefetch_threshold": 64, "prefetch_timeout_base": 0.5, "prefetch_timeout_per_ki_token": 2, "weights": "w"}'
    )
    assert read_options("file", given, "timeout") == (Limits(64, 0.5, 2), "w", None)
    for name, text in (("a.json", '{"weights": "w"}'), ("a.toml", 'weights = "w"'), ("a.yaml", "weights: w")):
        (tmp_path / name).write_text(text)
        assert read_options("file", f"@{tmp_path / name}", "timeout").weights == "w"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "give an object"),
        ('{"tp_lcm_size": 2}', "has tp_lcm_size; decode knows prefetch_threshold"),
        ('{"prefetch_threshold": 1.5}', "prefetch_threshold 1.5: give a number"),
        ('{"prefetch_timeout_base": -1}', "prefetch_timeout_base -1: give a number"),
        ('{"prefetch_timeout_base": true}', "prefetch_timeout_base True: give a number"),
        (f'{{"prefetch_timeout_base": {10**400}}}', "prefetch_timeout_base 10.*: give a number of 0 or more, at most"),
        (f'{{"prefetch_timeout_per_ki_token": {10**400}}}', "per_ki_token 10.*: give a number"),
        ('{"weights": ""}', "weights '': give a name"),
        ("@nowhere.json", "cannot be read"),
        ("@pyproject.ini", "cannot be read|ends in .json"),
    ],
)
def test_what_decode_does_not_know_is_refused(given, says):
    with pytest.raises(ValueError, match=f"--hicache-storage-backend-extra-config.*({says})"):
        read_options("file", given, "timeout")


def test_nobody_waits_for_a_storage_that_hangs():
    with pytest.raises(ValueError, match="wait_complete would have requests wait"):
        read_options("file", None, "wait_complete")


# ---- workers ----


@pytest.fixture
def worker(tmp_path, monkeypatch, model):
    """A decode worker whose storage was added as its options say."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    made = []

    def make(tp_rank: int = 0, tp_size: int = 1, **given: Any) -> StorageWorld:
        one = StorageWorld(tmp_path / "unused")
        one.close()
        given = {
            "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1, "prefetch_timeout_base": 20}',
            **given,
        }
        args = options(model, **given)
        add_storage(one.tree, args, options_of(args), tp_rank, tp_size)
        one.storage, one.threads = one.tier.storage, one.tier.storage.threads
        one.files = one.threads.files
        one.queue.loads = type(one.queue.loads)(one.tree)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("given", "hit"),
    [({}, 24), ({"dtype": "float16"}, 0), ({"tp_rank": 1, "tp_size": 2}, 0), ({"page_size": 32}, 0)],
)
def test_who_reads_what_another_worker_has_written(worker, monkeypatch, tmp_path, kind, given, hit):
    name, *master = kind.split()
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("MOONCAKE_MASTER", master[0] if master else "")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(1 << 25))
    one, two = worker(hicache_storage_backend=name), worker(hicache_storage_backend=name, **given)
    one.serve(tokens(1, 24))
    assert two.serve(tokens(1, 24)) == hit
    assert one.files.place == two.files.place if hit else one.files.place != two.files.place
    if master:
        # Each of them is a client, which begins to write at once.
        assert {type(files).__name__ for files in (one.files, two.files)} == {"PagesInMooncake"}
        for files in one.files, two.files:
            files._store.close()


def test_a_directory_that_cannot_be_made(worker, model, tmp_path, monkeypatch):
    one = worker()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "file" / "kv"))
    args = options(model)
    with pytest.raises(ValueError, match="cannot use .*kv: .*SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"):
        add_storage(one.tree, args, options_of(args), 0, 1)


def scheduler_of(one: StorageWorld) -> Scheduler:
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.tree_cache = one.tree
    scheduler.told = []
    scheduler.send_to_tokenizer = SimpleNamespace(send_output=lambda *answer: scheduler.told.append(answer))
    return scheduler


def answered(one: StorageWorld, scheduler: Scheduler) -> bool:
    """Whether what was asked as "clear" has been done, when that is answered."""

    def come() -> bool:
        scheduler.answer_storage_clears()
        return bool(scheduler.told)

    one.until(come, step=False)
    ((answer, asked),) = scheduler.told
    assert asked == "clear" and not scheduler.storage_clears
    scheduler.told.clear()
    return answer.success


def test_the_engines_routes(worker, caplog):
    one = worker()
    scheduler = scheduler_of(one)
    one.serve(tokens(1, 24))
    assert one.stored() and scheduler.clear_hicache_storage_wrapped("clear") is None
    assert answered(one, scheduler) and not one.stored()
    for done, answer in (
        ("attached", scheduler.attach_hicache_storage_wrapped(None)),
        ("detached", scheduler.detach_hicache_storage_wrapped(None)),
    ):
        assert not answer.success and f"cannot be {done} while it runs" in answer.message
    one.tier.storage = None
    assert not scheduler.clear_hicache_storage_wrapped(None).success
    assert "no storage to be cleared" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_waits_while_it_is_cleared(worker, monkeypatch, fails):
    """But the client, who hears what has become of it; or that nothing has, when that has taken too long."""
    one = worker()
    scheduler, opened, clear = scheduler_of(one), threading.Event(), one.files.clear
    one.serve(tokens(1, 24))
    one.files.clear = lambda: opened.wait(30) and not fails and clear() or raising()
    begun = time.monotonic()
    assert scheduler.clear_hicache_storage_wrapped("clear") is None
    scheduler.answer_storage_clears()
    assert time.monotonic() - begun < 10 and not scheduler.told and one.stored()
    # What is written meanwhile is not what was to be removed.
    one.complete(decode_req := one.admit(tokens(50, 12), max_new=1))
    one.step()
    while decode_req.req in one.running:
        one.decode()
    one.until(lambda: one.tier.memory.wait() or not one.tier.saves.busy)
    opened.set()
    assert answered(one, scheduler) is not fails
    one.settle()
    assert len(one.stored()) == (9 if fails else 3)
    opened.clear()
    monkeypatch.setattr(storage_scheduler, "CLEAR_S", 0.0)
    scheduler.clear_hicache_storage_wrapped("clear")
    assert not answered(one, scheduler)
    opened.set()


def raising() -> None:
    raise OSError("it fails")


def test_a_weight_update_ends_its_use(worker, caplog):
    one = worker()
    scheduler = scheduler_of(one)
    one.serve(tokens(1, 24))
    for _ in range(2):
        scheduler.before_weight_update()
    assert one.storage.stopped and caplog.text.count("uses the storage of KV no more") == 1
    one.forget()
    assert one.serve(tokens(1, 24)) == 0
