"""The calls of the CUDA driver that the engine needs for every tensor or boundary, by ctypes.

With torch's `copy_`, two views and an exchange between two streams, a piece of a copy took the host 66 us under the
profiler (H200), with these calls 17; 10 without the profiler, and 6 since two streams take the pieces in turn. A
DeepSeek-V3 layer has up to 26 pieces, and may wait for the host. An event of torch's on the stream that is current took
15 us between layers, since each is made anew; one used again takes 5.
Addresses and handles are integers: `Tensor.data_ptr()`, `Stream.cuda_stream`.

Two things that torch does and these calls do not: they need the device's context to be current in the calling thread,
and torch's allocator of pinned memory does not learn that a stream uses its memory.
"""

import ctypes
from collections.abc import Callable
from functools import cache

_NOT_READY = 600


class CudaDriver:
    """Raises RuntimeError, with the driver's name for it, when a call fails."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        handle, address = ctypes.c_void_p, ctypes.c_uint64
        self._error_name = library.cuGetErrorName
        self._error_name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
        self.copy = self._checked(library.cuMemcpyAsync, address, address, ctypes.c_size_t, handle)
        """(destination, source, num_bytes, stream): both ends are memory of any kind, addressed as torch does."""
        self.record = self._checked(library.cuEventRecord, handle, handle)
        """(event, stream)"""
        self._wait = self._checked(library.cuStreamWaitEvent, handle, handle, ctypes.c_uint)
        self._create = self._checked(library.cuEventCreate, ctypes.POINTER(handle), ctypes.c_uint)
        self.destroy = self._checked(library.cuEventDestroy_v2, handle)
        """(event): which need not have passed."""
        self._elapsed = self._checked(library.cuEventElapsedTime, ctypes.POINTER(ctypes.c_float), handle, handle)
        self._query = library.cuEventQuery
        self._query.argtypes = [handle]

    def create(self) -> int:
        """An event, with time, of the device whose context is current."""
        event = ctypes.c_void_p()
        self._create(ctypes.byref(event), 0)
        assert event.value is not None
        return event.value

    def passed(self, event: int) -> bool:
        """Whether the device has passed what the event recorded last."""
        status = self._query(event)
        if status and status != _NOT_READY:
            self._check(status, self._query, ())
        return not status

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two events that the device has passed."""
        elapsed = ctypes.c_float()
        self._elapsed(ctypes.byref(elapsed), start, end)
        return elapsed.value

    def wait(self, stream: int, event: int) -> None:
        """Let what comes next on the stream wait for what the event has recorded last."""
        self._wait(stream, event, 0)

    def _checked(self, function: Callable[..., int], *types: type) -> Callable[..., None]:
        function.argtypes = types  # type: ignore[attr-defined]
        function.errcheck = self._check  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    def _check(self, status: int, function: object, _arguments: object) -> None:
        if status:
            name = ctypes.c_char_p()
            self._error_name(status, ctypes.byref(name))
            raise RuntimeError(f"the CUDA driver refused {function}: {(name.value or b'?').decode()}")


cuda_driver = cache(CudaDriver)
