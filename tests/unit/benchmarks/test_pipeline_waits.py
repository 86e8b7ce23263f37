"""The waits of a pipeline's first stage."""

import pytest
import torch
from pipeline_waits import _wait_until, device_time, wait_until
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel


def test_the_kernel_reads_the_clock_until_it_is_time() -> None:
    """Compiled for a Hopper card, which needs none: one reading before the loop, and another in every turn."""
    source = ASTSource(fn=_wait_until, signature={"at": "*i64", "after_ns": "i32"}, constexprs={})
    code = compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    label = code.index("$L__BB0_1:")
    assert code.count("%globaltimer") == 2
    assert label < code.rindex("%globaltimer") < code.rindex("bra")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_a_machine_without_a_device_waits_for_nothing() -> None:
    assert device_time() is None
    wait_until(device_time(), 1e9)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_stream_stands_still_until_then() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun = device_time()
    start.record()
    wait_until(begun, 50)
    wait_until(begun, 10)  # has passed
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 45
