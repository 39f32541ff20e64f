"""The CUDA driver through ctypes: modules, memory, launches and events, each call checked."""

import ctypes
import ctypes.util

import numpy as np

SHARED_LIMIT, LOCAL_BYTES, REGISTERS = 8, 3, 4  # CUfunction_attribute


class Driver:
    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)
        self.call("cuCtxSetCurrent", self.context)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self.device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name, self.version = name.value.decode(), version.value
        self.held = []

    def call(self, name, *args):
        status = getattr(self.lib, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status} {text.value}")

    def device_attribute(self, which):
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, self.device)
        return value.value

    def load(self, path):
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), path.read_bytes())
        return module

    def function(self, module, symbol):
        f = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(f), module, symbol.encode())
        return f

    def attribute(self, f, which):
        value = ctypes.c_int()
        self.call("cuFuncGetAttribute", ctypes.byref(value), which, f)
        return value.value

    def allow_shared(self, f, bytes_):
        self.call("cuFuncSetAttribute", f, SHARED_LIMIT, int(bytes_))

    def alloc(self, bytes_):
        p = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(max(int(bytes_), 16)))
        self.held.append(p.value)
        return p.value

    def free_all(self):
        for p in self.held:
            self.call("cuMemFree_v2", ctypes.c_uint64(p))
        self.held.clear()

    def put(self, a):
        a = np.ascontiguousarray(a)
        p = self.alloc(a.nbytes)
        if a.nbytes:
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(p), a.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(a.nbytes))
        return p

    def get(self, p, shape, dtype):
        a = np.empty(shape, dtype)
        if a.nbytes:
            self.call("cuMemcpyDtoH_v2", a.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(p), ctypes.c_size_t(a.nbytes))
        return a

    def fill(self, p, byte, bytes_):
        self.call("cuMemsetD8_v2", ctypes.c_uint64(p), ctypes.c_ubyte(byte), ctypes.c_size_t(int(bytes_)))

    def launch(self, f, grid, block, shared, *values):
        args = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        grid = grid if isinstance(grid, tuple) else (grid, 1)
        self.call("cuLaunchKernel", f, *grid, 1, block, 1, 1, shared, None, args, None)

    def sync(self):
        self.call("cuCtxSynchronize")

    def event(self):
        e = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(e), 0)
        return e

    def times(self, work, repeats, warm_up=5):
        """Milliseconds of each of `repeats` calls of work."""
        for _ in range(warm_up):
            work()
        events = [self.event() for _ in range(2 * repeats)]
        for i in range(repeats):
            self.call("cuEventRecord", events[2 * i], None)
            work()
            self.call("cuEventRecord", events[2 * i + 1], None)
        self.sync()
        ms = []
        for i in range(repeats):
            t = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(t), events[2 * i], events[2 * i + 1])
            ms.append(t.value)
        for e in events:
            self.call("cuEventDestroy_v2", e)
        return ms
