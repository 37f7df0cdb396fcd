"""For engines of the tests on a CPU host: their KV pools lie in memory that a PegaFlow server maps without CUDA IPC."""

import os
import pickle
import sys

import wrapt

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def share_pools(module):
    import torch
    from shared_kv import share

    def shared(buffers):
        return [share(buffer.shape, buffer.dtype) for buffer in buffers]

    def pointers(buffers):
        return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)

    @wrapt.patch_function_wrapper(module, "MHATokenToKVPool._create_buffers")
    def mha(wrapped, pool, args, kwargs):
        wrapped(*args, **kwargs)
        pool.k_buffer, pool.v_buffer = shared(pool.k_buffer), shared(pool.v_buffer)
        pool.k_data_ptrs, pool.v_data_ptrs = pointers(pool.k_buffer), pointers(pool.v_buffer)
        pool.data_ptrs = torch.cat([pool.k_data_ptrs, pool.v_data_ptrs])

    @wrapt.patch_function_wrapper(module, "MLATokenToKVPool._create_buffers")
    def mla(wrapped, pool, args, kwargs):
        wrapped(*args, **kwargs)
        pool.kv_buffer = shared(pool.kv_buffer)

    @wrapt.patch_function_wrapper(module, "NSATokenToKVPool.__init__")
    def nsa(wrapped, pool, args, kwargs):
        wrapped(*args, **kwargs)
        pool.index_k_with_scale_buffer = shared(pool.index_k_with_scale_buffer)


def map_without_cuda(module):
    from shared_kv import SharedTensor

    module.check_device = lambda device: None
    module.wrapper_bytes = lambda tensor: pickle.dumps(SharedTensor(tensor))


wrapt.register_post_import_hook(share_pools, "sglang.srt.mem_cache.memory_pool")
wrapt.register_post_import_hook(map_without_cuda, "sglang.srt.mem_cache.pegaflow.memory")
