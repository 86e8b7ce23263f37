"""The scan of a Mamba-2 layer against the recurrence that it stands for."""

import pytest
import torch
from torch import Tensor

from nemo_rl_offload.megatron.layers.mamba import scan

ROWS, LENGTH, HEADS, HEAD, GROUPS, STATE = 2, 21, 6, 4, 2, 3


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double)

    return {
        "x_BLND": normal(ROWS, LENGTH, HEADS, HEAD),
        "step_BLN": normal(ROWS, LENGTH, HEADS).abs(),
        "decay_N": -normal(HEADS).abs(),
        "b_BLGS": normal(ROWS, LENGTH, GROUPS, STATE),
        "c_BLGS": normal(ROWS, LENGTH, GROUPS, STATE),
    }


def _recurrence(
    x_BLND: Tensor, step_BLN: Tensor, decay_N: Tensor, b_BLGS: Tensor, c_BLGS: Tensor, state_BNDS: Tensor
) -> tuple[Tensor, Tensor]:
    b_BLNS, c_BLNS = (each.repeat_interleave(HEADS // GROUPS, dim=2) for each in (b_BLGS, c_BLGS))
    outputs = []
    for token in range(LENGTH):
        kept_BN, step_BN = (step_BLN[:, token] * decay_N).exp(), step_BLN[:, token]
        added_BNDS = (step_BN[..., None] * x_BLND[:, token])[..., None] * b_BLNS[:, token, :, None]
        state_BNDS = kept_BN[..., None, None] * state_BNDS + added_BNDS
        outputs.append((state_BNDS * c_BLNS[:, token, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), state_BNDS


@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 64])
@pytest.mark.parametrize("has_state", [False, True])
def test_it_is_the_recurrence(chunk: int, has_state: bool) -> None:
    inputs = {name: value.requires_grad_() for name, value in _inputs().items()}
    zero = torch.zeros(ROWS, HEADS, HEAD, STATE, dtype=torch.double)
    state = torch.randn(zero.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    found = scan(**inputs, chunk=chunk, state_BNDS=state if has_state else None)
    expected = _recurrence(**inputs, state_BNDS=state if has_state else zero)
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad(sum(each.square().sum() for each in pair), inputs.values()) for pair in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_a_large_decay_overflows_nothing() -> None:
    inputs = {**_inputs(), "decay_N": torch.full((HEADS,), -1e4, dtype=torch.double)}
    inputs = {name: value.float().requires_grad_() for name, value in inputs.items()}
    outputs, state = scan(**inputs, chunk=8)
    (outputs.sum() + state.sum()).backward()
    assert all(each.isfinite().all() for each in (outputs, state, *(value.grad for value in inputs.values())))
