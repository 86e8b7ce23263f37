"""A job of hours goes on when nobody reads its output any more: `run ... | head`, a pager that was left, a dead `tee`.

What it says from then on is written nowhere. The run directory has all of it. Rejected: to end, as commands do that
only print (`plan ... | head -1`): the reader was not asked for the job's result.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import cast


class _Outliving(io.FileIO):
    """Writes to a file descriptor, and to nowhere from when its reader is gone."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Return how much was taken, all of it where nobody reads."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Standard output and error take what is written to them, whether their readers are there or not."""
    replaced = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError):  # closed from the start, or no file
            raw = _Outliving(stream.fileno(), "w", closefd=False)
            stream.flush()
            replaced[name] = stream
            outliving = io.TextIOWrapper(
                io.BufferedWriter(cast("io.RawIOBase", raw)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=True,
                write_through=stream.write_through,
            )
            setattr(sys, name, outliving)
    try:
        yield
    finally:
        for name, stream in replaced.items():
            with contextlib.suppress(OSError):
                getattr(sys, name).flush()
            setattr(sys, name, stream)
