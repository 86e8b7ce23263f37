"""SDPA in Megatron's layout against attention written out."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_offload.megatron.layers import attention as attention_module
from nemo_rl_offload.megatron.layers.attention import TorchDotProductAttention


def make_config(**changes: object) -> TransformerConfig:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0}
    return TransformerConfig(**{**shape, **changes})


def make_attention(config: TransformerConfig, layer_number: int = 1, **kwargs: object) -> TorchDotProductAttention:
    return TorchDotProductAttention(config, layer_number, AttnMaskType.causal, "self", **kwargs)


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor, scale: float) -> Tensor:
    """softmax(q k^T scale) v, one batch row and head at a time; `forbidden` is [batch, sq, sk]."""
    num_queries, batch_size, num_heads, _ = query.shape
    heads_per_group = num_heads // key.shape[2]
    rows = []
    for row in range(batch_size):
        heads = []
        for head in range(num_heads):
            group = head // heads_per_group
            scores = query[:, row, head].double() @ key[:, row, group].double().T * scale
            weights = scores.masked_fill(forbidden[row], -torch.inf).softmax(-1)
            heads.append(weights @ value[:, row, group].double())
        rows.append(torch.cat(heads, dim=-1))
    return torch.stack(rows, dim=1).view(num_queries, batch_size, -1)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 7),
    batch_size=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    value_width=st.sampled_from([8, 5]),
    scale=st.sampled_from([None, 0.7]),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_explicit_attention(
    length: int, batch_size: int, groups: int, value_width: int, scale: float | None, masked: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(length, batch_size, 4, 8, generator=generator)
    key = torch.randn(length, batch_size, groups, 8, generator=generator)
    value = torch.randn(length, batch_size, groups, value_width, generator=generator)
    forbidden = torch.ones(length, length).triu(1).bool().repeat(batch_size, 1, 1)
    mask = None
    if masked:
        forbidden |= torch.rand(batch_size, length, length, generator=generator) < 0.3
        forbidden[:, range(length), range(length)] = False
        mask = forbidden[:, None]
    attention = make_attention(make_config(), softmax_scale=scale)
    expected = explicit_attention(query, key, value, forbidden, scale or 8**-0.5)
    torch.testing.assert_close(attention(query, key, value, mask).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 1, 6).bool()])
def test_one_new_token_sees_the_whole_cache(mask: Tensor | None) -> None:
    query, key, value = torch.randn(1, 2, 4, 8), torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8)
    output = make_attention(make_config())(query, key, value, mask, attn_mask_type=AttnMaskType.no_mask)
    expected = explicit_attention(query, key, value, torch.zeros(2, 1, 6).bool(), 8**-0.5)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_as_near_as_its_eight_bits() -> None:
    query, key, value = (torch.randn(5, 2, 4, 8).bfloat16() for _ in range(3))
    forbidden = torch.ones(5, 5).triu(1).bool().repeat(2, 1, 1)
    output = make_attention(make_config())(query, key, value, None)
    assert output.dtype == torch.bfloat16
    # The weights are rounded to 8 bits before the product, and the result once more: 2 * 2^-8.
    expected = explicit_attention(query, key, value, forbidden, 8**-0.5)
    torch.testing.assert_close(output.double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("scale", [None, 0.7])
def test_query_key_layer_scaling_divides_by_the_layer(scale: float | None) -> None:
    query, key, value = (torch.randn(5, 2, 4, 8) for _ in range(3))
    attention = make_attention(make_config(apply_query_key_layer_scaling=True), layer_number=3, softmax_scale=scale)
    forbidden = torch.ones(5, 5).triu(1).bool().repeat(2, 1, 1)
    expected = explicit_attention(query, key, value, forbidden, (scale or 8**-0.5) / 3)
    torch.testing.assert_close(attention(query, key, value, None).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("lengths", [(1,), (4, 1, 3), (2, 2, 2)])
def test_a_packs_sequences_do_not_see_each_other(lengths: tuple[int, ...], value_width: int) -> None:
    """Bit for bit what each sequence gives alone, also in the gradients."""
    query, key = (torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2))
    value = torch.randn(sum(lengths), 2, value_width, requires_grad=True)
    attention = make_attention(make_config())
    output = attention(query, key, value, None, packed_seq_params=SimpleNamespace(lengths=lengths, part=None))
    assert output.shape == (sum(lengths), 4 * value_width)
    parts = zip(*(t[:, None].split(lengths) for t in (query, key, value)), strict=True)
    alone = [attention(*part, None)[:, 0] for part in parts]
    assert torch.equal(output, torch.cat(alone))
    weights = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weights).sum(), (query, key, value))
    assert all(
        map(torch.equal, gradients, torch.autograd.grad((torch.cat(alone) * weights).sum(), (query, key, value)))
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("num_groups", "width"), [(4, 64), (2, 128), (1, 8)])
def test_a_pack_in_one_call_is_as_near_as_eight_bits(
    num_groups: int, width: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients in bfloat16, against sequence by sequence in float64."""
    lengths = (7, 1, 130, 64, 2)
    torch.manual_seed(0)
    shapes = [(sum(lengths), heads, width) for heads in (4, num_groups, num_groups)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    factors = torch.randn(sum(lengths), 4 * width, device="cuda")
    attention = make_attention(make_config(kv_channels=width))
    attention.window = window
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    pack = SimpleNamespace(lengths=lengths, cu_seqlens_q=bounds, part=None)

    def run(dtype: torch.dtype) -> list[Tensor]:
        typed = [t.to(dtype) for t in inputs]
        output = attention(*typed, None, packed_seq_params=pack)
        return [output.double(), *(t.double() for t in torch.autograd.grad((output * factors).sum(), typed))]

    calls = []
    varlen = attention_module.varlen_attn
    monkeypatch.setattr(attention_module, "varlen_attn", lambda *args, **how: calls.append(1) or varlen(*args, **how))
    in_one, exact = run(torch.bfloat16), run(torch.float64)
    assert calls == [1], "and none in float64"
    # Weights of keys, their gradients and the result are rounded to 8 bits each: 2^-9 three times, and a little.
    for one, true in zip(in_one, exact, strict=True):
        assert (one - true).norm() <= 2**-7 * true.norm() + 1e-3  # some are 0: of a window of one key


def test_what_goes_to_the_kernel_for_packs() -> None:
    """By what torch's flash attention takes; everything else is attended sequence by sequence."""

    def tensor(width: int, dtype: torch.dtype, *, is_cuda: bool) -> Any:
        return SimpleNamespace(shape=(5, 4, width), dtype=dtype, is_cuda=is_cuda)

    attention = make_attention(make_config())
    of_gpu = tensor(64, torch.bfloat16, is_cuda=True)
    assert attention._takes_whole_packs(of_gpu, of_gpu)
    for width, dtype, is_cuda in (
        (64, torch.bfloat16, False),
        (64, torch.float32, True),
        (264, torch.bfloat16, True),
        (60, torch.float16, True),
    ):
        other = tensor(width, dtype, is_cuda=is_cuda)
        assert not attention._takes_whole_packs(other, other)
    assert not attention._takes_whole_packs(of_gpu, tensor(48, torch.bfloat16, is_cuda=True))
    attention.dropout = 0.5
    assert not attention._takes_whole_packs(of_gpu, of_gpu)
    assert attention.eval()._takes_whole_packs(of_gpu, of_gpu)


def test_dropout_only_in_training() -> None:
    query, key, value = (torch.randn(5, 2, 4, 8) for _ in range(3))
    with_dropout = make_attention(make_config(sequence_parallel=False), attention_dropout=0.5).eval()
    assert torch.equal(with_dropout(query, key, value, None), make_attention(make_config())(query, key, value, None))


@settings(max_examples=40, deadline=None)
@given(
    num_queries=st.integers(1, 6),
    num_cached=st.integers(0, 6),
    window=st.sampled_from([None, 1, 2, 3, 50]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_windows_and_sinks_equal_explicit_attention(
    num_queries: int, num_cached: int, window: int | None, has_sinks: bool, seed: int
) -> None:
    """Also behind a cache of earlier keys, where the queries are the last ones; a sink is a key of value zero."""
    torch.manual_seed(seed)
    num_keys = num_queries + num_cached
    query, key, value = (
        torch.randn(num_queries, 2, 4, 8),
        torch.randn(num_keys, 2, 2, 8),
        torch.randn(num_keys, 2, 2, 8),
    )
    config = make_config(softmax_type="learnable" if has_sinks else "vanilla", use_cpu_initialization=True)
    config.window_size = None if window is None else (window - 1, 0)
    layer = make_attention(config)
    positions = torch.arange(num_keys)
    distance = positions[num_cached:, None] - positions
    forbidden = (distance < 0) | (distance >= (window or num_keys))
    expected = explicit_attention(query, key, value, forbidden.repeat(2, 1, 1), 8**-0.5)
    if has_sinks:
        assert layer.softmax_offset is not None
        torch.nn.init.normal_(layer.softmax_offset)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key.repeat_interleave(2, 2)).double() * 8**-0.5
        total = scores.masked_fill(forbidden, -torch.inf).logsumexp(-1)
        kept = torch.sigmoid(total - layer.softmax_offset.view(1, 4, 1)).permute(2, 0, 1)
        expected = (expected.unflatten(-1, (4, 8)) * kept.unsqueeze(-1)).flatten(2)
    mask_type = AttnMaskType.no_mask if num_queries == 1 else AttnMaskType.causal
    if num_cached and mask_type == AttnMaskType.causal and window is None and not has_sinks:
        return  # without a mask of our own, several new tokens behind a cache are nobody's case
    output = layer(query, key, value, None, mask_type)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-6)


def test_a_layer_without_a_window_between_windowed_ones() -> None:
    config = make_config(window_size=(1, 0), window_attn_skip_freq=[1, 0])
    assert [make_attention(config, layer).window for layer in (1, 2)] == [2, None]


def test_sinks_are_trained() -> None:
    layer = make_attention(make_config(softmax_type="learnable", use_cpu_initialization=True))
    assert layer.softmax_offset is not None
    torch.nn.init.zeros_(layer.softmax_offset)
    layer(*(torch.randn(5, 2, 4, 8) for _ in range(3)), None).sum().backward()
    assert layer.softmax_offset.grad is not None
    assert bool((layer.softmax_offset.grad != 0).all())
