"""The kernels compile for a Hopper card, which needs none, and read and write pages in pieces of 16 bytes."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nemo_rl_offload.paged_stash import kernels

DIVISIBLE = [["tt.divisibility", 16]]


def ptx(function: Any, word: str, tile: int, **constants: Any) -> str:
    """Code for sm_90, arguments aligned as the allocator and a page of 64 rows of 14336 bytes align them."""
    jitted = triton.jit(function)
    signature, attributes = {}, {}
    for number, name in enumerate(jitted.arg_names):
        if name in constants or name == "TILE":
            signature[name] = "constexpr"
            continue
        is_words = name in ("source", "target", "device_pages", "host_pages")
        is_int64 = name in ("num_rows", "ring", "state", "record")
        signature[name] = f"*{word}" if is_words else "*i64" if is_int64 else "i32"
        if name not in ("num_device", "num_host"):
            attributes[number,] = DIVISIBLE
    values = {(jitted.arg_names.index(name),): value for name, value in {"TILE": tile, **constants}.items()}
    source = ASTSource(fn=jitted, signature=signature, constexprs=values, attrs=attributes)
    code: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return code


@pytest.mark.parametrize(
    ("function", "flags"), [(kernels._stash, {}), (kernels._restore, {"COPY": True})], ids=["stash", "restore"]
)
def test_pages_are_copied_in_pieces_of_16_bytes(function: Any, flags: dict[str, Any]) -> None:
    code = ptx(function, "i64", 2048, **flags)
    assert "ld.global.v2.b64" in code
    assert "st.global.v2.b64" in code
    assert "atom.global.gpu.acq_rel" in code


@pytest.mark.slow
@pytest.mark.parametrize("name", ["num_device", "num_host", "page_size", "row_words"])
def test_arguments_of_one_compile(name: str) -> None:
    """Triton makes constants of them."""
    ptx(kernels._stash, "u8", 16384, **{name: 1})
    ptx(kernels._restore, "u8", 16384, COPY=True, **{name: 1})
    ptx(kernels._restore, "u8", 16384, COPY=False, **{name: 1})
