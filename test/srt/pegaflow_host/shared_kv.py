"""Host memory that two processes map, in the place of CUDA IPC.

A KV pool whose buffers `share` has made lies in an anonymous file of its process, which ends with the process. Another
process of the same user maps it as ``/proc/<pid>/fd/<fd>`` while the first one lives.
"""

import ctypes
import mmap
import os

# Start of a buffer made here, and the file that it lies in.
_files: dict[int, tuple[int, int]] = {}


def share(shape, dtype):
    """A tensor of zeros, in memory that the server can map."""
    import torch

    count = 1
    for n in shape:
        count *= n
    fd = os.memfd_create("pegaflow-kv")
    nbytes = count * torch.empty(0, dtype=dtype).element_size()
    os.ftruncate(fd, nbytes)
    tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=count, dtype=dtype).view(shape)
    _files[tensor.data_ptr()] = fd, nbytes
    return tensor


class SharedTensor:
    """What is pickled for the server in the place of the client's CudaIPCWrapper. It is a tensor there, too."""

    def __init__(self, tensor):
        fd, self.nbytes_ = _files[tensor.data_ptr()]
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self.size = tensor.element_size()

    def to_tensor(self):
        with open(self.path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), self.nbytes_)
        self.view = (ctypes.c_char * self.nbytes_).from_buffer(self.map)
        return self

    # What the server asks a tensor for.

    @property
    def device(self):
        import torch

        return torch.device("cuda", 0)

    def data_ptr(self):
        return ctypes.addressof(self.view)

    def untyped_storage(self):
        return self

    def nbytes(self):
        return self.nbytes_

    def storage_offset(self):
        return 0

    def element_size(self):
        return self.size
