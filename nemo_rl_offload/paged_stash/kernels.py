"""Copies the live rows of a tensor into pages and back, and takes and returns the pages, in one launch each.

How many rows live is only known on the device, so the host launches a fixed number of programs that share the work. The
freelist is a ring per tier (`pages.py` says what must happen; the kernels do the same). Who reads and writes it:

| | `stash` | `restore` |
|---|---|---|
| every program, at its start | reads the heads and tails | reads the tails |
| a page's programs | read its ring entry; the first writes the record | the first writes the ring entry |
| the last program to end | writes the heads and the counters | writes the tails |

Programs of one launch run in any order and together, so nothing that they read may be written before all have read it.
Heads and tails are therefore written by whichever program finishes last: each adds one to `DONE` after its reads (a
barrier before, so that this holds for all its warps), with acquire and release semantics, and the one that finds all
others done writes. Ring entries from head to tail are only read in `stash`; those behind the tail only written in
`restore`. Launches follow each other on one stream. A separate launch for the bookkeeping would need no counter, but
each copy would wait for it.

A page holds whole rows, one behind the other, as in the source; so a page is copied as one run of words, the widest
that divide a row. Offsets are int64. Triton's interpreter runs the same functions for tensors on a CPU, one program
after the other: it cannot show a race, which a stress test on a device does. (Loops are `while`, since the
interpreter's `range` fails with numpy 2.5.)
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_TILE_BYTES = 16384
_PROGRAMS_PER_PROCESSOR = 8

STATE = ("head_device", "head_host", "tail_device", "tail_host", "done", "overflowed", "spilled", "peak")
"""What the int64 tensor `state` of a pool holds."""
RECORD_HEADER = 3
"""Pages on the device, pages on the host and rows; the page ids follow."""


def _stash(  # type: ignore[no-untyped-def]
    source,
    device_pages,
    host_pages,
    num_rows,
    ring,
    state,
    record,
    num_device,
    num_host,
    page_size,
    row_words,
    TILE: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rows = tl.load(num_rows).to(tl.int64)
    head_device, head_host = tl.load(state), tl.load(state + 1)
    tail_device, tail_host = tl.load(state + 2), tl.load(state + 3)
    wanted = (rows + page_size - 1) // page_size
    on_device = tl.minimum(wanted, tail_device - head_device)
    on_host = wanted - on_device
    fits = on_host <= tail_host - head_host
    on_device = tl.where(fits, on_device, 0)
    on_host = tl.where(fits, on_host, 0)

    page_words = page_size * row_words
    tiles = (page_words + TILE - 1) // TILE
    tile = program.to(tl.int64)
    while tile < (on_device + on_host) * tiles:
        index = tile // tiles
        begin = (tile % tiles) * TILE
        if index < on_device:
            page = tl.load(ring + (head_device + index) % tl.maximum(num_device, 1))
        else:
            page = tl.load(ring + num_device + (head_host + index - on_device) % tl.maximum(num_host, 1))
        if begin == 0:
            tl.store(record + 3 + index, page)
        live = tl.minimum(rows - index * page_size, page_size) * row_words
        offsets = begin + tl.arange(0, TILE)
        words = tl.load(source + index * page_words + offsets, mask=offsets < live)
        if index < on_device:
            tl.store(device_pages + page * page_words + offsets, words, mask=offsets < live)
        else:
            tl.store(host_pages + (page - num_device) * page_words + offsets, words, mask=offsets < live)
        tile += num_programs

    tl.debug_barrier()
    if tl.atomic_add(state + 4, 1, sem="acq_rel") == num_programs - 1:
        used = num_device - (tail_device - head_device) + num_host - (tail_host - head_host)
        tl.store(record, on_device)
        tl.store(record + 1, on_host)
        tl.store(record + 2, tl.where(fits, rows, 0))
        tl.store(state, head_device + on_device)
        tl.store(state + 1, head_host + on_host)
        tl.store(state + 4, 0)
        tl.store(state + 5, tl.where(fits, tl.load(state + 5), 1))
        tl.store(state + 6, tl.load(state + 6) + on_host)
        tl.store(state + 7, tl.maximum(tl.load(state + 7), used + wanted))


def _restore(  # type: ignore[no-untyped-def]
    target,
    device_pages,
    host_pages,
    ring,
    state,
    record,
    num_device,
    num_host,
    page_size,
    row_words,
    TILE: tl.constexpr,
    COPY: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    on_device, on_host, rows = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    tail_device, tail_host = tl.load(state + 2), tl.load(state + 3)

    page_words = page_size * row_words
    tiles = (page_words + TILE - 1) // TILE if COPY else 1
    tile = program.to(tl.int64)
    while tile < (on_device + on_host) * tiles:
        index = tile // tiles
        begin = (tile % tiles) * TILE
        page = tl.load(record + 3 + index)
        if begin == 0:
            if index < on_device:
                tl.store(ring + (tail_device + index) % tl.maximum(num_device, 1), page)
            else:
                tl.store(ring + num_device + (tail_host + index - on_device) % tl.maximum(num_host, 1), page)
        if COPY:
            live = tl.minimum(rows - index * page_size, page_size) * row_words
            offsets = begin + tl.arange(0, TILE)
            if index < on_device:
                words = tl.load(device_pages + page * page_words + offsets, mask=offsets < live)
            else:
                words = tl.load(host_pages + (page - num_device) * page_words + offsets, mask=offsets < live)
            tl.store(target + index * page_words + offsets, words, mask=offsets < live)
        tile += num_programs

    tl.debug_barrier()
    if tl.atomic_add(state + 4, 1, sem="acq_rel") == num_programs - 1:
        tl.store(state + 2, tail_device + on_device)
        tl.store(state + 3, tail_host + on_host)
        tl.store(state + 4, 0)


@cache
def _kernel(function: Any, device_type: str) -> Any:
    return triton.jit(function) if device_type == "cuda" else InterpretedFunction(function)


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


class Pool:
    """Pages for rows of one width, `row_bytes`: `num_device` on `device`, `num_host` in pinned host memory.

    All operations go to the current stream and read nothing on the host; one stream must be used for all of them, or
    waits between them. The pages' content and freelist are in device memory, but for the host's pages.
    """

    def __init__(self, row_bytes: int, page_size: int, num_device: int, num_host: int, device: torch.device) -> None:
        self.row_bytes, self.page_size = row_bytes, page_size
        self.num_device, self.num_host = num_device, num_host
        self.num_programs = _num_programs(device)
        self._word_bytes = next(size for size in _WORDS if row_bytes % size == 0)
        page_bytes = page_size * row_bytes
        self.device_pages = torch.empty(num_device * page_bytes, dtype=torch.uint8, device=device)
        self.host_pages = torch.empty(
            num_host * page_bytes, dtype=torch.uint8, pin_memory=num_host > 0 and device.type == "cuda"
        )
        self.ring = torch.arange(num_device + num_host, dtype=torch.int64, device=device)
        self.state = torch.zeros(len(STATE), dtype=torch.int64, device=device)
        self.state[STATE.index("tail_device")], self.state[STATE.index("tail_host")] = num_device, num_host

    def new_record(self, capacity: int) -> Tensor:
        """An int64 tensor for `stash` to note the pages of up to `capacity` rows in."""
        size = RECORD_HEADER + -(-capacity // self.page_size)
        return torch.empty(size, dtype=torch.int64, device=self.ring.device)

    def stash(self, source: Tensor, num_rows: Tensor, record: Tensor) -> None:
        """Copy the first `num_rows` (int64 or int32, [1]) rows of `source` into pages; `record` says which.

        `source` is a contiguous storage of rows, uint8 [rows x row_bytes]. Where the pages do not suffice nothing is
        copied, the record is empty, and the counter `overflowed` is 1.
        """
        self._launch(_stash, source, num_rows, record)

    def restore(self, target: Tensor, record: Tensor) -> None:
        """Copy the rows back to the start of `target`, uint8 [rows x row_bytes], and return the pages."""
        self._launch(_restore, target, None, record, COPY=True)

    def release(self, record: Tensor) -> None:
        """Return the pages of `record`, int64 [header + pages], and copy nothing."""
        self._launch(_restore, self.device_pages, None, record, COPY=False)

    def _launch(self, function: Any, rows: Tensor, num_rows: Tensor | None, record: Tensor, **flags: bool) -> None:
        """`rows` uint8 [rows x row_bytes]; `num_rows` int64 or int32 [1]; `record` int64 [header + pages]."""
        dtype, device = _WORDS[self._word_bytes], self.ring.device
        device_pages, host_pages = self.device_pages.view(dtype), self.host_pages.view(dtype)
        tile = _TILE_BYTES // self._word_bytes
        if device.type != "cuda":
            tile = min(tile, triton.next_power_of_2(self.page_size * self.row_bytes // self._word_bytes))
        _kernel(function, device.type)[(self.num_programs,)](
            rows.view(dtype),
            device_pages,
            host_pages if self.num_host else device_pages,
            *(() if num_rows is None else (num_rows,)),
            self.ring,
            self.state,
            record,
            self.num_device,
            self.num_host,
            self.page_size,
            self.row_bytes // self._word_bytes,
            TILE=tile,
            **flags,
        )

    def counters(self) -> dict[str, int]:
        """The freelist's state by the names in `STATE`; the host waits for it."""
        return dict(zip(STATE, self.state.tolist(), strict=True))
