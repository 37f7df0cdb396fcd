"""What pegaflow-server 0.25.1 asks of torch, without CUDA: one device, whose memory is the host's.

Stands in for torch in the server's interpreter only. Memory itself is mapped by `shared_kv.SharedTensor`.
"""

import sys
import types


class _Properties:
    name = "host memory"
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    total_memory = 1 << 40
    major, minor = 9, 0


class device:
    def __init__(self, kind="cuda", index=0):
        self.type, self.index = kind.split(":")[0], index


def empty(*args, **kwargs):
    return types.SimpleNamespace(device=device())


cuda = types.ModuleType("torch.cuda")
cuda.is_available = lambda: True
cuda.init = lambda: None
cuda.device_count = lambda: 1
cuda.set_device = lambda index: None
cuda.synchronize = lambda device=None: None
cuda.empty_cache = lambda: None
cuda.ipc_collect = lambda: None
cuda.get_device_properties = lambda index: _Properties()
sys.modules["torch.cuda"] = cuda
