"""Log-probabilities and entropy from hidden states, beside plain operators on whole logits."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from patience import PATIENCE_S
from torch import Tensor

from nemo_rl_offload.megatron.step.fused_linear import Head, LowRank, linear_logprobs, linear_topk
from nemo_rl_offload.megatron.step.head_kernels import block_gradient, block_statistics

TOKENS, HIDDEN, VOCABULARY = 11, 6, 300
NARROW = 2 * 128 * TOKENS * 12
"""Bytes of a block two hundred and fifty-six wide."""
HEAD = Head(scale=1 / 0.7, num_local=VOCABULARY, first=0, group=None)
HOW = {
    "whole": HEAD,
    "blocks": replace(HEAD, block_bytes=NARROW // 2),
    "chunks": replace(HEAD, chunk_tokens=4),
    "both": replace(HEAD, chunk_tokens=3, block_bytes=NARROW // 4),
    "padded": replace(HEAD, num_local=VOCABULARY - 37, block_bytes=NARROW // 2),
}


def make_inputs(dtype: torch.dtype, limit: int, num_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = (2 * torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)).to(dtype)
    ids = torch.stack([torch.randperm(limit, generator=generator)[:num_ids] for _ in range(TOKENS)])
    return hidden.requires_grad_(), weight.requires_grad_(), ids


def plain(hidden: Tensor, weight: Tensor, ids: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight[: head.num_local].T) * head.scale
    return logits.log_softmax(-1).gather(-1, ids), torch.distributions.Categorical(logits=logits).entropy()


def make_adapter(dtype: torch.dtype) -> LowRank:
    generator = torch.Generator().manual_seed(3)
    inputs, weight = (
        torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype) for size in (TOKENS, VOCABULARY)
    )
    return LowRank(inputs.requires_grad_(), weight.requires_grad_())


def beside(hidden: Tensor, weight: Tensor, adapter: LowRank) -> tuple[Tensor, Tensor]:
    """Hidden states and a weight whose product is that of both pairs."""
    return torch.cat([hidden, adapter.inputs], dim=1), torch.cat([weight, adapter.weight], dim=1)


def distance(value: Tensor, expected: Tensor) -> float:
    return float((value.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("num_ids", [1, 5])
@pytest.mark.parametrize("wants_entropy", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_values_and_gradients_are_those_of_whole_logits(
    how: str, num_ids: int, wants_entropy: bool, dtype: torch.dtype, tolerance: float
) -> None:
    head = HOW[how]
    hidden, weight, ids = make_inputs(dtype, head.num_local, num_ids)
    logprobs, entropy = linear_logprobs(hidden, weight, ids, head, entropy=wants_entropy)
    expected, expected_entropy = plain(hidden.double(), weight.double(), ids, head)
    assert distance(logprobs, expected) < tolerance
    factors = torch.linspace(-1, 2, TOKENS * num_ids, dtype=torch.float64).view(TOKENS, num_ids)
    loss, expected_loss = (logprobs * factors).sum(), (expected * factors).sum()
    if entropy is not None:
        assert distance(entropy, expected_entropy) < tolerance
        loss = loss + (entropy * factors[:, 0].cos()).sum()
        expected_loss = expected_loss + (expected_entropy * factors[:, 0].cos()).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected_loss, (hidden, weight)), strict=True):
        assert gradient.dtype == dtype
        assert distance(gradient, wanted) < tolerance
    assert entropy is None or wants_entropy


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("num_ids", [1, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_an_adapter_adds_its_logits_and_a_frozen_weight_has_no_gradient(
    how: str, num_ids: int, dtype: torch.dtype, tolerance: float
) -> None:
    head = HOW[how]
    hidden, weight, ids = make_inputs(dtype, head.num_local, num_ids)
    weight.requires_grad_(False)
    adapter = make_adapter(dtype)
    exact = [each.detach().double().requires_grad_() for each in (hidden, *adapter)]
    logprobs, entropy = linear_logprobs(hidden, weight, ids, head, entropy=True, adapter=adapter)
    expected = plain(*beside(exact[0], weight.double(), LowRank(*exact[1:])), ids, head)
    assert entropy is not None
    assert distance(logprobs, expected[0]) < tolerance
    assert distance(entropy, expected[1]) < tolerance
    factors = torch.linspace(-1, 2, TOKENS * num_ids, dtype=torch.float64).view(TOKENS, num_ids)
    loss, wanted = (
        (chosen * factors).sum() + (of_all * factors[:, 0].cos()).sum()
        for chosen, of_all in ((logprobs, entropy), expected)
    )
    gradients = torch.autograd.grad(loss, (hidden, *adapter))
    for gradient, exact_gradient in zip(gradients, torch.autograd.grad(wanted, exact), strict=True):
        assert gradient.dtype == dtype
        assert distance(gradient, exact_gradient) < tolerance


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("num_ids", [1, 4])
def test_bfloat16_is_no_further_from_float64_than_whole_logits_are(how: str, num_ids: int) -> None:
    head = HOW[how]
    hidden, weight, ids = make_inputs(torch.bfloat16, head.num_local, num_ids)
    exact = make_inputs(torch.float64, head.num_local, num_ids)
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), ids)
    errors = []
    wanted, _ = plain(*exact, head)
    wanted_gradients = torch.autograd.grad(wanted.sum(), exact[:2])
    whole = ((hidden @ weight[: head.num_local].T).float() * head.scale).log_softmax(-1).gather(-1, ids)
    for logprobs in (whole, linear_logprobs(hidden, weight, ids, head, entropy=False)[0]):
        gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
        values = ((logprobs, wanted), *zip(gradients, wanted_gradients, strict=True))
        errors.append([distance(value, expected) for value, expected in values])
    for fused, reference in zip(errors[1], errors[0], strict=True):
        assert fused < 1.05 * reference + 1e-7


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_an_adapter_in_bfloat16_is_no_further_from_float64_than_whole_logits_are(device: str) -> None:
    """Of 64 tokens: rounding of eleven comes out one way or the other."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((64, HIDDEN), (64, 3), (VOCABULARY, 3), (VOCABULARY, HIDDEN))
    *trained, weight = (torch.randn(size, generator=generator).bfloat16().to(device) for size in sizes)
    ids = torch.randint(0, VOCABULARY, (64, 1), generator=generator).to(device)
    for each in trained:
        each.requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in trained]
    wanted, _ = plain(*beside(exact[0], weight.double(), LowRank(*exact[1:])), ids, HEAD)
    wanted_gradients = torch.autograd.grad(wanted.sum(), exact)
    logits = trained[0] @ weight.T + trained[1] @ trained[2].T
    whole = (logits.float() * HEAD.scale).log_softmax(-1).gather(-1, ids)
    fused, _ = linear_logprobs(trained[0], weight, ids, HEAD, entropy=False, adapter=LowRank(*trained[1:]))
    errors = []
    for logprobs in (whole, fused):
        values = (logprobs, wanted), *zip(torch.autograd.grad(logprobs.sum(), trained), wanted_gradients, strict=True)
        errors.append([distance(value, expected) for value, expected in values])
    for found, reference in zip(errors[1], errors[0], strict=True):
        assert found < 1.05 * reference + 1e-7


def test_a_frozen_weight_or_body_has_no_gradient() -> None:
    hidden, weight, ids = make_inputs(torch.float32, VOCABULARY, 1)
    wanted = torch.autograd.grad(plain(hidden, weight, ids, HEAD)[0].sum(), (hidden, weight))
    for number, (h, w) in enumerate(((hidden, weight.detach()), (hidden.detach(), weight))):
        (gradient,) = torch.autograd.grad(linear_logprobs(h, w, ids, HEAD, entropy=False)[0].sum(), (h, w)[number])
        assert distance(gradient, wanted[number]) < 1e-6


def test_no_logits_are_saved_and_blocks_are_of_their_size() -> None:
    hidden, weight, ids = make_inputs(torch.float32, VOCABULARY, 1)
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        linear_logprobs(hidden, weight, ids, HEAD, entropy=True)
    assert max(saved) == weight.numel() < TOKENS * VOCABULARY


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("k", [1, 7, 400])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_topk_is_that_of_whole_logits(how: str, k: int, has_adapter: bool) -> None:
    head = HOW[how]
    hidden, weight, _ = make_inputs(torch.float32, VOCABULARY, 1)
    adapter = make_adapter(torch.float32) if has_adapter else None
    with torch.no_grad():
        values, ids = linear_topk(hidden, weight, k, head, adapter)
        both = (hidden, weight) if adapter is None else beside(hidden, weight, adapter)
        logits = (both[0] @ both[1].T)[:, : head.num_local] * head.scale
    num_found = min(k, head.num_local)
    expected = logits.topk(num_found, dim=-1)
    torch.testing.assert_close(values[:, :num_found], expected.values)
    assert torch.equal(ids[:, :num_found], expected.indices)
    assert values.shape == (TOKENS, min(k, VOCABULARY))
    assert torch.isneginf(values[:, num_found:]).all()


def compare_kernels(device: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (10 * torch.randn(shape, generator=generator)).to(device)
    results = [block_statistics(logits, 1.3, entropy=True, by_kernel=by_kernel) for by_kernel in (True, False)]
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=1e-5)
    expected = (1.3 * logits.double()).log_softmax(-1)
    torch.testing.assert_close(results[1].entropy.double(), -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-6)
    assert block_statistics(logits, 1.3, entropy=False, by_kernel=True)[2] is None
    ids = torch.randint(-shape[1], 2 * shape[1], shape[:1], generator=generator).to(device)
    factors = [torch.randn(shape[0], generator=generator).to(device) for _ in range(3)]
    for entropy, of_entropy in ((results[1].entropy, factors[2]), (None, None)):
        plain_out, out = torch.empty_like(logits), logits.clone()
        how = (1.3, results[1].largest, results[1].total.log(), ids, *factors[:2], entropy, of_entropy)
        block_gradient(logits, plain_out, *how, by_kernel=False)
        block_gradient(out, out, *how, by_kernel=True)
        torch.testing.assert_close(out, plain_out, rtol=2e-5, atol=1e-5)


@pytest.mark.slow
def test_kernels_are_plain_operators_in_tritons_interpreter() -> None:
    code = "; ".join(f"compare_kernels('cpu', {shape})" for shape in ((3, 5), (2, 128), (2, 4500)))
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", f"from test_fused_linear import compare_kernels; {code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(64, 5), (17, 6656), (8, 9001)])
def test_kernels_are_plain_operators_on_a_device(shape: tuple[int, int]) -> None:
    compare_kernels("cuda", shape)
