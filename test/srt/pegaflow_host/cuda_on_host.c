/* The part of the CUDA driver and runtime that pegaflow-server 0.25.1 calls, with host memory as device memory.
 *
 * Built once under the names libcuda.so.1 and libcudart.so.12, for tests of the real server on a machine without a GPU.
 * Copies are done when they are asked for, so streams and events have nothing to wait for: order between streams is
 * what this cannot show.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
enum { VERSION = 12080 };

static char something[64];
static _Thread_local void *current;

/* For the test of a load or save that takes its time: microseconds that each copy waits. */
static void wait_a_little(void) {
    static int us = -1;
    if (us < 0) {
        const char *value = getenv("CUDA_ON_HOST_COPY_US");
        us = value ? atoi(value) : 0;
    }
    if (us > 0) usleep(us);
}

/* For a test of what comes in the middle of a load or save: a copy waits while there is a file of this name, and makes
 * one beside it that says so. */
static void wait_while_held(void) {
    const char *path = getenv("CUDA_ON_HOST_HOLD");
    char waits[4096];
    if (!path || access(path, F_OK)) return;
    snprintf(waits, sizeof waits, "%s.waits", path);
    close(open(waits, O_CREAT | O_WRONLY, 0600));
    while (!access(path, F_OK)) usleep(1000);
}

CUresult cuInit(unsigned flags) { return OK; }
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == OK ? "no error" : "not part of the host-memory stand-in";
    return OK;
}
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return OK; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = something; return OK; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
CUresult cuCtxSetCurrent(void *context) { current = context; return OK; }
CUresult cuCtxGetCurrent(void **context) { *context = current; return OK; }
CUresult cuCtxSynchronize(void) { return OK; }
CUresult cuCtxDestroy_v2(void *context) { return OK; }
CUresult cuStreamCreate(void **stream, unsigned flags) { *stream = something; return OK; }
CUresult cuStreamDestroy_v2(void *stream) { return OK; }
CUresult cuStreamSynchronize(void *stream) { return OK; }
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return OK; }
CUresult cuEventCreate(void **event, unsigned flags) { *event = something; return OK; }
CUresult cuEventRecord(void *event, void *stream) { return OK; }
CUresult cuEventSynchronize(void *event) { return OK; }
CUresult cuEventDestroy_v2(void *event) { return OK; }

CUresult cuMemAlloc_v2(uintptr_t *pointer, size_t size) {
    return (*pointer = (uintptr_t)malloc(size ? size : 1)) ? OK : OUT_OF_MEMORY;
}
CUresult cuMemAllocAsync(uintptr_t *pointer, size_t size, void *stream) { return cuMemAlloc_v2(pointer, size); }
CUresult cuMemFree_v2(uintptr_t pointer) { free((void *)pointer); return OK; }
CUresult cuMemFreeAsync(uintptr_t pointer, void *stream) { return cuMemFree_v2(pointer); }
CUresult cuMemsetD8Async(uintptr_t pointer, unsigned char value, size_t size, void *stream) {
    memset((void *)pointer, value, size);
    return OK;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *stream) {
    wait_a_little();
    wait_while_held();
    memmove(to, (void *)from, size);
    return OK;
}
CUresult cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *stream) {
    wait_a_little();
    wait_while_held();
    memmove((void *)to, from, size);
    return OK;
}

/* The server's other way of copying, a kernel of its own, is not there. */
CUresult cuModuleLoad(void **module, const char *path) { return NOT_SUPPORTED; }
CUresult cuModuleLoadData(void **module, const void *image) { return NOT_SUPPORTED; }
CUresult cuModuleUnload(void *module) { return OK; }
CUresult cuModuleGetFunction(void **function, void *module, const char *name) { return NOT_SUPPORTED; }
CUresult cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **parameters, void **extra) {
    return NOT_SUPPORTED;
}

int cudaDriverGetVersion(int *version) { *version = VERSION; return OK; }
int cudaRuntimeGetVersion(int *version) { *version = VERSION; return OK; }
const char *cudaGetErrorString(int error) { return error == OK ? "no error" : "error of the host-memory stand-in"; }
int cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    /* Untouched, so that a pool costs only what is used of it. */
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    *pointer = memory;
    return OK;
}
int cudaFreeHost(void *pointer) { return OK; }
int cudaHostRegister(void *pointer, size_t size, unsigned flags) { return OK; }
int cudaHostUnregister(void *pointer) { return OK; }
int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = host;
    return host ? OK : INVALID_VALUE;
}
