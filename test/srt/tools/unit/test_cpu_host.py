"""CPU-host support: the kernel placeholder, the paged allocator without Triton, and that CUDA hosts see none of it."""

import importlib
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_pd_radix.supplied import cpu_host
from sglang_pd_radix.supplied.cpu_host import kernels
from sglang_pd_radix.supplied.cpu_host.allocator import extend_slots


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    cpu_host.active.cache_clear()
    yield
    cpu_host.active.cache_clear()


# -- when it is active ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "switch, driver, platform, other, expected",
    [
        (None, False, "linux", False, True),
        (None, True, "linux", False, False),
        ("", False, "linux", False, True),
        # The switch wins over the driver.
        ("1", True, "linux", False, True),
        ("0", False, "linux", False, False),
        # Other platforms and accelerators are left alone.
        (None, False, "darwin", False, False),
        (None, False, "linux", True, False),
    ],
)
def test_where_it_is_active(monkeypatch, switch, driver, platform, other, expected):
    monkeypatch.delenv(cpu_host.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(cpu_host.SWITCH, switch)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(cpu_host, "has_cuda_driver", lambda: driver)
    monkeypatch.setattr(cpu_host, "has_other_accelerator", lambda: other)
    assert cpu_host.active() is expected


def test_install_on_a_cuda_host_leaves_no_trace(monkeypatch):
    import wrapt

    monkeypatch.delenv(cpu_host.SWITCH, raising=False)
    monkeypatch.setattr(cpu_host, "has_cuda_driver", lambda: True)
    monkeypatch.setattr(cpu_host, "_installed", False)
    monkeypatch.setattr(wrapt, "register_post_import_hook", lambda *a: pytest.fail("a hook was registered"))
    finders, environ = list(sys.meta_path), dict(os.environ)
    cpu_host.install()
    assert (sys.meta_path, dict(os.environ), cpu_host._installed) == (finders, environ, False)


# -- sgl_kernel ----------------------------------------------------------------------------------------------------


@pytest.fixture
def placeholder(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [cpu_host.kernels.KernelPlaceholderFinder(), *sys.meta_path])
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == kernels.KERNELS}
    yield importlib.import_module("sgl_kernel")
    for name in [name for name in sys.modules if name.split(".")[0] == kernels.KERNELS]:
        del sys.modules[name]
    sys.modules.update(saved)


def test_every_import_of_the_placeholder_resolves(placeholder):
    import sgl_kernel.allreduce as allreduce
    from sgl_kernel import silu_and_mul
    from sgl_kernel.quantization.gguf import ggml_dequantize  # a module below a module
    from sgl_kernel.scalar_type import scalar_types

    assert silu_and_mul is placeholder.silu_and_mul
    assert allreduce.init_custom_ar is not None and ggml_dequantize is not None
    assert scalar_types.uint4b8 is not None  # the engine names such constants in class bodies
    assert importlib.util.find_spec("sgl_kernel") is not None


def test_a_called_op_names_itself_and_the_way_out(placeholder):
    from sgl_kernel.elementwise import rmsnorm

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.elementwise\.rmsnorm .*needs a CUDA GPU.*torch_native"):
        rmsnorm(torch.ones(1), torch.ones(1))


# -- paged allocator -----------------------------------------------------------------------------------------------


def _slots_by_hand(prefixes, lens, last_locs, free_pages, page_size):
    """One token at a time: a token that starts a page takes the next free one, any other follows its predecessor."""
    free, out = list(free_pages), []
    for prefix, length, slot in zip(prefixes, lens, last_locs, strict=True):
        for token in range(prefix, length):
            slot = free.pop(0) * page_size if token % page_size == 0 else slot + 1
            out.append(slot)
    return out


def _last_loc(rng, prefix, page_size):
    return -1 if prefix == 0 else rng.randrange(1000, 2000) * page_size + (prefix - 1) % page_size


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_extend_slots_equals_token_by_token(page_size, dtype):
    rng = random.Random(page_size)
    edges = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size - 1]
    for _ in range(60):
        batch = rng.randrange(1, 7)
        prefixes = [rng.choice(edges) if rng.random() < 0.7 else rng.randrange(200) for _ in range(batch)]
        lens = [p + (rng.choice(edges) if rng.random() < 0.7 else rng.randrange(200)) for p in prefixes]
        last = [_last_loc(rng, p, page_size) for p in prefixes]
        free = rng.sample(range(1, 900), 900 - 1)
        expected = _slots_by_hand(prefixes, lens, last, free, page_size)
        out = torch.full((len(expected),), -7)
        as_tensor = lambda values: torch.tensor(values, dtype=dtype)  # noqa: E731
        extend_slots(as_tensor(prefixes), as_tensor(lens), as_tensor(last), torch.tensor(free), out, page_size)
        assert out.tolist() == expected


@pytest.fixture(scope="module")
def paged_allocator():
    """The engine's allocator module with the torch kernels in it, whatever this host is."""
    from sglang.srt.mem_cache import allocator

    saved = allocator.alloc_extend_kernel, allocator.alloc_decode_kernel
    cpu_host.allocator._patch_allocator(allocator)
    yield allocator
    allocator.alloc_extend_kernel, allocator.alloc_decode_kernel = saved


@pytest.mark.parametrize("page_size", [4, 64])
def test_the_engines_allocator_extends_and_decodes(paged_allocator, page_size):
    pages = 40
    pool = paged_allocator.PagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.float32, "cpu", None, False)
    rng = random.Random(page_size)
    prefixes = [0, 0, 0]
    lens = [rng.randrange(1, 3 * page_size), page_size, 2 * page_size - 1]
    slots = [[], [], []]
    for step in range(2 * page_size + 3):
        prefix_lens, seq_lens = torch.tensor(prefixes), torch.tensor(lens)
        last = torch.tensor([s[-1] if s else -1 for s in slots])
        if step == 0:
            out = pool.alloc_extend(prefix_lens, prefix_lens, seq_lens, seq_lens, last, sum(lens))
        else:
            out = pool.alloc_decode(seq_lens, seq_lens, last)
        for own, count, prefix in zip(slots, lens, prefixes, strict=True):
            own += out[: count - prefix].tolist()
            out = out[count - prefix :]
        held = [slot // page_size for own in slots for slot in own[::page_size]]
        assert len(set(held)) == len(held) and 0 not in held
        assert pool.available_size() == (pages - len(held)) * page_size
        for own in slots:
            assert all(slot == own[i - 1] + 1 for i, slot in enumerate(own) if i % page_size)
        prefixes, lens = lens, [n + 1 for n in lens]
    pool.free(torch.tensor(sum(slots, [])))
    assert pool.available_size() == pages * page_size
    assert (
        pool.alloc_extend(
            *[torch.tensor([0])] * 2,
            *[torch.tensor([pages * page_size + 1])] * 2,
            torch.tensor([-1]),
            pages * page_size + 1,
        )
        is None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("pool", ["MHATokenToKVPool", "MLATokenToKVPool"])
def test_kv_of_a_retracted_request_comes_back(pool, dtype, monkeypatch):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache import memory_pool

    kind = getattr(memory_pool, pool)
    # Put back afterwards.
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)
    for name in ("get_key_buffer", "get_value_buffer"):
        monkeypatch.setattr(kind, name, kind.__dict__[name])
    cpu_host.memory_pool._patch_memory_pool(memory_pool)
    shape = {"head_num": 2, "head_dim": 4} if pool.startswith("MHA") else {"kv_lora_rank": 4, "qk_rope_head_dim": 2}
    kv = kind(size=16, page_size=4, dtype=dtype, layer_num=2, device="cpu", enable_memory_saver=False, **shape)
    buffers = [*getattr(kv, "k_buffer", []), *getattr(kv, "v_buffer", []), *getattr(kv, "kv_buffer", [])]
    for buffer in buffers:
        # As attention would write it: numbers of the pool's type.
        buffer.view(dtype)[:] = torch.randn(buffer.shape).to(dtype)
    # A page in the pool, in a transfer and in the counters: as many bytes as its numbers have.
    numbers = 4 * (2 * 4 if pool.startswith("MHA") else 6)
    assert set(kv.get_contiguous_buf_infos()[2]) == {numbers * dtype.itemsize}
    old, new = torch.tensor([4, 5, 6, 7, 8]), torch.tensor([12, 13, 14, 15, 16])
    held = [buffer[old].clone() for buffer in buffers]
    read = kv.get_key_buffer(1)[old].clone()
    copy = kv.get_cpu_copy(old)
    for buffer in buffers:
        buffer.zero_()  # the slots go to another request
    # Without the first three tokens, which the tree has kept.
    overlays = [base.restore_kv_cache.__globals__ for base in Req.__mro__ if hasattr(base, "restore_kv_cache")]
    (tail, *_) = [names["_tail"] for names in overlays if "_tail" in names]
    kv.load_cpu_copy([tail(layer, 3, kv.cpu_offloading_chunk_size) for layer in copy], new[3:])
    assert not any(buffer[new[:3]].any() for buffer in buffers)
    kv.load_cpu_copy(copy, new)
    assert len(buffers) in (2, 4)
    assert all(torch.equal(buffer[new], before) for buffer, before in zip(buffers, held, strict=True))
    # Attention can compute with what it reads.
    assert read.dtype == torch.float32 and torch.equal(kv.get_key_buffer(1)[new], read)


@pytest.mark.parametrize("pool", ["MHATokenToKVPool", "MLATokenToKVPool"])
def test_a_hierarchical_cache_copies_both_ways(pool, monkeypatch):
    from sglang.srt.mem_cache import memory_pool, memory_pool_host

    # Put back afterwards.
    monkeypatch.setattr(memory_pool_host, "ALLOC_MEMORY_FUNCS", memory_pool_host.ALLOC_MEMORY_FUNCS.copy())
    monkeypatch.setattr(memory_pool_host, "transfer_kv_direct", memory_pool_host.transfer_kv_direct)
    cpu_host.hicache._patch_host_pool(memory_pool_host)
    shape = {"head_num": 2, "head_dim": 4} if pool.startswith("MHA") else {"kv_lora_rank": 4, "qk_rope_head_dim": 2}
    kv = getattr(memory_pool, pool)(
        size=16, page_size=4, dtype=torch.float32, layer_num=2, device="cpu", enable_memory_saver=False, **shape
    )
    host = getattr(memory_pool_host, pool + "Host")(kv, 2.0, 0, 4, "layer_first")
    buffers = [*getattr(kv, "k_buffer", []), *getattr(kv, "v_buffer", []), *getattr(kv, "kv_buffer", [])]
    for buffer in buffers:
        buffer.normal_()
    old, new, kept = torch.arange(4, 12), torch.tensor([12, 13, 14, 15, 4, 5, 6, 7]), host.alloc(8)
    before = [buffer[old].clone() for buffer in buffers]
    host.backup_from_device_all_layer(kv, kept, old, "direct")
    for buffer in buffers:
        buffer.zero_()
    for layer in range(2):
        host.load_to_device_per_layer(kv, kept, new, layer, "direct")
    assert all(torch.equal(buffer[new], was) for buffer, was in zip(buffers, before, strict=True))


def test_lora_of_a_batch_is_each_requests_own(monkeypatch):
    from sglang.srt.lora.backend import torch_backend

    wrapped = torch_backend.TorchNativeLoRABackend.__dict__["prepare_lora_batch"]
    monkeypatch.setattr(torch_backend.TorchNativeLoRABackend, "prepare_lora_batch", wrapped)  # put back afterwards
    cpu_host.lora._patch_torch_backend(torch_backend)
    backend = torch_backend.TorchNativeLoRABackend(3, torch.device("cpu"))
    torch.manual_seed(1)
    lora_a, lora_b = torch.randn(3, 4, 6), torch.randn(3, 5, 4)
    # Slot 0 is the base model's; the adapter in slot 2 has a smaller rank than there is room for.
    ranks, scalings, slots = [0, 4, 2], [0.0, 0.5, 2.0], [1, 1, 0, 2, 1]
    lora_a[2, 2:], lora_b[2, :, 2:] = 0, 0
    for decode in (True, False):
        lengths = [1] * 5 if decode else [3, 1, 2, 4, 2]
        mode = SimpleNamespace(
            is_decode=lambda decode=decode: decode, is_target_verify=lambda: False, is_extend=lambda: True
        )
        batch = SimpleNamespace(
            batch_size=5,
            forward_mode=mode,
            extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
            extend_seq_lens_cpu=lengths,
        )
        backend.prepare_lora_batch(batch, slots, ranks, scalings, False)
        x, base = torch.randn(sum(lengths), 6), torch.randn(sum(lengths), 5)
        got = backend.run_lora_b_sgemm(backend.run_lora_a_sgemm(x, lora_a), lora_b, base.clone())
        of_token = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
        want = torch.stack(
            [
                base[i] + scalings[slot] * (lora_b[slot] @ (lora_a[slot] @ x[i])) * (ranks[slot] > 0)
                for i, slot in enumerate(of_token)
            ]
        )
        torch.testing.assert_close(got, want)


# -- the rest ------------------------------------------------------------------------------------------------------


IDLE_AGENT = """
import resource, time
from sglang_pd_radix.supplied import cpu_host

cpu_host.install()
from nixl._api import nixl_agent, nixl_agent_config

agent = nixl_agent("idle", nixl_agent_config(num_threads=8))
before = time.process_time()
time.sleep(1)
print(time.process_time() - before)
"""


def test_an_idle_nixl_agent_leaves_the_cores_alone():
    """Its progress thread spins otherwise, in every worker: all of one core."""
    env = {**os.environ, cpu_host.SWITCH: "1", "NIXL_LOG_LEVEL": "ERROR"}
    shown = subprocess.run([sys.executable, "-c", IDLE_AGENT], env=env, capture_output=True, text=True, timeout=60)
    assert float(shown.stdout.split()[-1]) < 0.2, shown


@pytest.mark.parametrize("offset, rows", [(0, 3), (2, 3), (4, 0), (5, 1)])
def test_rows_are_copied_to_and_from_all_ranks_rows(offset, rows):
    """What the engine's Triton kernel does; the tensor of one rank may be longer than what there is to copy."""
    everybody, own = torch.arange(18.0).view(6, 3), -torch.ones(4, 3)
    got = own.clone()
    cpu_host.dp_attention.copy_rows(got, everybody, 0, torch.tensor(offset), torch.tensor(rows), True)
    assert torch.equal(got, torch.cat([everybody[offset : offset + rows], own[rows:]]))
    put = everybody.clone()
    cpu_host.dp_attention.copy_rows(put, own, 0, torch.tensor(offset), torch.tensor(rows), False)
    assert torch.equal(put, torch.cat([everybody[:offset], own[:rows], everybody[offset + rows :]]))


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(
    "pending, waits", [({}, False), ({"waiting_queue": [1]}, True), ({"disagg_prefill_inflight_queue": [1]}, True)]
)
def test_an_idle_scheduler_rests_until_a_message_or_a_peer(pending, waits, in_step):
    """Not for long where other DP ranks wait for it."""
    polled = []

    class SchedulerRuntimeCheckerMixin:
        recv_from_tokenizer = SimpleNamespace(poll=polled.append)
        waiting_queue: list = []
        require_mlp_sync = in_step

        def self_check_during_idle(self):
            self.checked = True

    module = SimpleNamespace(SchedulerRuntimeCheckerMixin=SchedulerRuntimeCheckerMixin)
    cpu_host.idle._patch_idle(module)
    scheduler = module.SchedulerRuntimeCheckerMixin()
    vars(scheduler).update(pending)
    scheduler.self_check_during_idle()
    assert scheduler.checked
    rest = cpu_host.idle.DP_IDLE_POLL_MS if in_step else cpu_host.idle.IDLE_POLL_MS
    assert polled == ([] if waits else [rest])
    scheduler.recv_from_tokenizer = None  # every rank but the first
    scheduler.self_check_during_idle()


@pytest.mark.parametrize("device, backend, expected", [("cpu", None, "torch_batched"), ("cpu", "triton", "triton")])
def test_options_left_open_become_those_that_run_here(monkeypatch, device, backend, expected):
    class ServerArgs:
        def _handle_cpu_backends(self):
            self.handled = True

    monkeypatch.setattr(cpu_host.kernels, "has_cpu_kernels", lambda: False)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    module = SimpleNamespace(ServerArgs=ServerArgs)
    cpu_host.options._patch_server_args(module)
    args = module.ServerArgs()
    args.device, args.attention_backend, args.disable_overlap_schedule = device, backend, False
    args.speculative_algorithm = None
    args.enable_torch_compile = backend is not None
    args._handle_cpu_backends()
    assert (args.handled, args.attention_backend, args.disable_overlap_schedule) == (True, expected, False)
    # Compiled only for those who ask for it.
    assert os.environ.get("TORCHDYNAMO_DISABLE") == (None if args.enable_torch_compile else "1")
