"""On a device: copies are exact, and thousands of programs that run together lose no page."""

import random

import pytest
import torch

from nemo_rl_offload.paged_stash.kernels import RECORD_HEADER, Pool
from nemo_rl_offload.paged_stash.pages import Pages

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("row_bytes", [2, 14, 1026, 14336])
@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("live", [0, 1, 777, 1000])
def test_live_rows_come_back_and_dead_ones_stay(row_bytes: int, page_size: int, live: int) -> None:
    pool = Pool(row_bytes, page_size, 600 // page_size, 2000 // page_size, DEVICE)
    source = torch.randint(0, 256, (1000 * row_bytes,), dtype=torch.uint8, device=DEVICE)
    target = torch.full_like(source, 0xA5)
    record = pool.new_record(1000)
    pool.stash(source, torch.tensor([live], device=DEVICE), record)
    pool.restore(target, record)
    assert torch.equal(target[: live * row_bytes], source[: live * row_bytes])
    assert bool((target[live * row_bytes :] == 0xA5).all())
    assert (pool.counters()["spilled"] > 0) == (live > 600)


@pytest.mark.parametrize("num_programs", [1, 133, 4096, 20000])
def test_thousands_of_programs_lose_no_page(num_programs: int) -> None:
    """Rings as long as the reference's after every few launches, with records of many one-row pages."""
    rng = random.Random(num_programs)
    pool, pages = Pool(16, 1, 3000, 1500, DEVICE), Pages(1, 3000, 1500)
    pool.num_programs = num_programs
    source = torch.randint(0, 256, (2000 * 16,), dtype=torch.uint8, device=DEVICE)
    held: list[tuple[torch.Tensor, int, list[int]]] = []
    for number in range(600):
        if held and rng.random() < 0.5:
            record, live, expected = held.pop(rng.randrange(len(held)))
            target = torch.zeros_like(source)
            pool.restore(target, record)
            pages.restore(expected)
            if expected:
                assert torch.equal(target[: live * 16], source[: live * 16])
        else:
            live = rng.randint(0, 2000)
            record = pool.new_record(2000)
            pool.stash(source, torch.tensor([live], device=DEVICE), record)
            held.append((record, live, pages.stash(live)))
        if number % 20 == 0:
            counters = pool.counters()
            assert (counters["head_device"], counters["tail_device"]) == (pages.device.head, pages.device.tail)
            assert (counters["head_host"], counters["tail_host"]) == (pages.host.head, pages.host.tail)
            assert pool.ring.tolist() == pages.device.ring + pages.host.ring
            assert counters["done"] == 0
            for record, _, expected in held:
                assert record[RECORD_HEADER : RECORD_HEADER + len(expected)].tolist() == expected
            pages.check([expected for _, _, expected in held])
    assert pages.overflowed
    assert pages.num_spilled > 0
