"""What elements are worth in NVFP4: ModelOpt's own values, and those of a search through all that the format has."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_offload.megatron.layers.quantization import nvfp4

MODELOPT = json.loads((Path(__file__).parents[2] / "modelopt.json").read_text())["nvfp4"]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def searched(x: Tensor, block: int, amax: Tensor) -> Tensor:
    """[..., in] by looking through the format's numbers; the nearest, of two the one with the even code."""

    def nearest(values: Tensor, numbers: Tensor) -> Tensor:
        distance = (values.unsqueeze(-1) - numbers).abs()
        codes = torch.arange(len(numbers))
        is_near = distance == distance.amin(-1, keepdim=True)
        return numbers[torch.where(is_near, codes % 2 * 1000 + codes, 1 << 20).argmin(-1)]

    unit = (amax / torch.tensor(6.0 * 448.0)).double() if amax > 0 else torch.tensor(1.0, dtype=torch.float64)
    blocks = x.double().reshape(-1, block)
    scale = nearest((blocks.abs().amax(-1) / (6 * unit)).float().double(), E4M3) * unit
    scale = scale.float().double().unsqueeze(-1)
    scaled = torch.where(scale > 0, (blocks / scale).float().double(), 0)
    return (nearest(scaled.abs().clamp(max=6), E2M1) * scale * scaled.sign()).reshape(x.shape)


def drawn(seed: int, exponent: int, *, most: float = 20.0) -> Tensor:
    """bfloat16 [6, 64], whose rows are of magnitudes up to exp(2 * most) times each other's."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(6, 1, generator=generator).mul(3).clamp(-most, most).exp()
    return (torch.randn(6, 64, generator=generator) * spread * 2.0**exponent).to(torch.bfloat16)


@pytest.mark.parametrize("case", range(len(MODELOPT)))
def test_elements_are_worth_what_they_are_to_modelopt(case: int) -> None:
    block, x, worth = (MODELOPT[case][key] for key in ("block", "x", "worth"))
    values = torch.tensor(x).view(2, 64)
    found = nvfp4(values, block, values.abs().amax())
    torch.testing.assert_close(found, torch.tensor(worth).view(2, 64), rtol=1e-6, atol=0)


@given(st.integers(0, 10_000), st.integers(-20, 10), st.sampled_from([16, 32]))
def test_elements_are_worth_the_nearest_number(seed: int, exponent: int, block: int) -> None:
    x = drawn(seed, exponent)
    amax = x.abs().amax().float()
    # Products of three roundings to float32 against one.
    torch.testing.assert_close(nvfp4(x.float(), block, amax).double(), searched(x, block, amax), rtol=1e-6, atol=0)


@given(st.integers(0, 10_000), st.integers(-20, 10), st.sampled_from([16, 32]))
def test_quantizing_twice_changes_nothing(seed: int, exponent: int, block: int) -> None:
    x = drawn(seed, exponent, most=2.0)
    once = nvfp4(x, block, x.abs().amax().float())
    assert once.dtype == torch.bfloat16
    amax = once.abs().amax().float()
    assert amax == x.abs().amax(), "the largest stays"
    assert torch.equal(nvfp4(once, block, amax), once)


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(2, 32)
    assert torch.equal(nvfp4(x, 16, x.amax()), x)
    x[0, :16] = torch.linspace(-1, 1, 16)
    assert torch.equal(nvfp4(x, 16, torch.tensor(1.0))[:, 16:], x[:, 16:])


def test_what_is_beyond_the_largest_is_clipped() -> None:
    x = torch.full((1, 16), 8.0)
    assert torch.equal(nvfp4(x, 16, torch.tensor(6.0)), torch.full((1, 16), 6.0))
