"""Rotary positions of packs: bit for bit Megatron's, which asks the device for the bounds."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from nemo_rl_offload.batching.context_parts import own_positions
from nemo_rl_offload.batching.packing import Packing
from nemo_rl_offload.megatron.layers import packed_rotary
from nemo_rl_offload.megatron.layers.packed_rotary import announce_pack, rotate_pack
from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
FORMS = [{}, {"rotary_interleaved": True}, {"mla_rotary_interleaved": True}, {"mscale": 1.3}]

install_cpu_support()


def make(lengths: list[int], dim: int, dtype: torch.dtype = torch.float32, rotated: int = 8) -> tuple[Tensor, ...]:
    """Values of a pack, its bounds, and the angles of the longest sequence."""
    generator = torch.Generator().manual_seed(sum(lengths))
    t = torch.randn(sum(lengths), 3, dim, generator=generator).to(dtype).requires_grad_()
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return t, bounds, torch.randn(max(lengths), 1, 1, rotated, generator=generator)


def rotate_both(
    t: Tensor, bounds: Tensor, angles: Tensor, form: dict[str, Any], group: Any = ALONE
) -> list[tuple[Tensor, Tensor]]:
    """Output and gradient of Megatron's function and of this project's."""
    outcomes = []
    for rotate in (packed_rotary._megatrons, rotate_pack):
        output = rotate(t, bounds, angles, cp_group=group, **form)
        (gradient,) = torch.autograd.grad(output, t, torch.arange(output.numel()).view_as(output).to(t))
        outcomes.append((output, gradient))
    return outcomes


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    dim=st.sampled_from([8, 12]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    form=st.sampled_from(FORMS),
)
@settings(max_examples=80, deadline=None)
def test_it_is_megatrons_bit_for_bit(lengths: list[int], dim: int, dtype: torch.dtype, form: dict[str, Any]) -> None:
    t, bounds, angles = make(lengths, dim, dtype)
    announce_pack(bounds, lengths)
    (expected, expected_gradient), (output, gradient) = rotate_both(t, bounds, angles, form)
    assert torch.equal(output, expected)
    assert torch.equal(gradient, expected_gradient)


@given(
    halves=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    num_ranks=st.integers(2, 4),
    form=st.sampled_from(FORMS),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_context_parallel_ranks_part_is_megatrons_bit_for_bit(
    halves: list[int], num_ranks: int, form: dict[str, Any], data: st.DataObject
) -> None:
    """And what the whole pack's tokens get at those positions."""
    lengths = [2 * num_ranks * half for half in halves]
    rank = data.draw(st.integers(0, num_ranks - 1))
    whole, bounds, angles = make(lengths, 8)
    own = own_positions(lengths, rank, num_ranks)
    t = whole.detach()[own].requires_grad_()
    announce_pack(bounds, lengths)
    group = SimpleNamespace(size=lambda: num_ranks, rank=lambda: rank)
    (expected, expected_gradient), (output, gradient) = rotate_both(t, bounds, angles, form, group)
    assert torch.equal(output, expected)
    assert torch.equal(gradient, expected_gradient)
    assert torch.equal(output, rotate_pack(whole, bounds, angles.clone(), cp_group=ALONE, **form)[own])


def test_packs_and_angles_that_take_turns_keep_apart() -> None:
    packs = [make([5, 2], 8), make([3, 4], 8)]
    for _, bounds, _ in packs:
        announce_pack(bounds, bounds.diff().tolist())
    for _ in range(2):
        for t, bounds, angles in packs:
            for factor in (1.0, 0.5):
                (expected, _), (output, _) = rotate_both(t, bounds, angles * factor, {})
                assert torch.equal(output, expected)


def test_layers_keep_one_pair_of_tables_for_each_type_and_scale() -> None:
    t, bounds, angles = make([5, 2], 8)
    announce_pack(bounds, [5, 2])
    kept: set[int] = set()

    def keep(saved: Tensor) -> Tensor:
        kept.add(saved.untyped_storage().data_ptr())
        return saved

    def rotate(values: Tensor, mscale: float) -> Tensor:
        return rotate_pack(values, bounds, angles, mscale=mscale, cp_group=ALONE)

    outputs = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        outputs = [rotate(t, 1.0) for _ in range(3)]
        assert len(kept) == 2
        outputs += [rotate(t.bfloat16(), mscale) for mscale in (1.0, 2.0) for _ in range(3)]
    assert len(kept) == 6
    assert not torch.equal(outputs[-1], outputs[-4])


def test_there_is_a_table_of_one_pack_at_most_and_none_without_packs() -> None:
    packs = [make([5, 2], 8) for _ in range(3)]
    for t, bounds, angles in packs:
        announce_pack(bounds, [5, 2])
        rotate_pack(t, bounds, angles, cp_group=ALONE)
        assert len(packed_rotary._tables) == 1
    del packs, t, bounds, angles
    assert len(packed_rotary._tables) == 0


def test_what_is_announced_is_read_from_nowhere_else_and_megatron_uses_it() -> None:
    t, bounds, angles = make([5, 2], 8)
    expected = packed_rotary._megatrons(t, bounds, angles, cp_group=ALONE)
    announce_pack(bounds, [5, 2])
    bounds.zero_()
    config: Any = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    assert torch.equal(rope_utils.apply_rotary_pos_emb(t, angles, config, bounds, cp_group=ALONE), expected)


@pytest.mark.parametrize("why", ["not announced", "an angle a token"])
def test_the_rest_is_left_to_megatron(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    t, bounds, angles = make([5, 2], 8)
    taken: list[Tensor] = []
    monkeypatch.setattr(packed_rotary, "_megatrons", lambda t, *_args, **_how: taken.append(t))
    if why != "not announced":
        announce_pack(bounds, [5, 2])
    if why == "an angle a token":
        angles = torch.randn(7, 1, 1, 8)
    rotate_pack(t, bounds, angles, cp_group=ALONE)
    assert len(taken) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_for_nothing_on_a_device() -> None:
    lengths = [5, 2]
    t, bounds, angles = make(lengths, 8)
    packing = Packing.of_rows(lengths, 5, 8, "cuda")
    t, bounds, angles = t.detach().cuda().requires_grad_(), bounds.cuda(), angles.cuda()
    (expected, expected_gradient) = rotate_both(t, bounds, angles, {})[0]
    weights = torch.arange(t.numel()).view_as(t).to(t)
    values = torch.randn(2, 5, 3, device="cuda", requires_grad=True)
    announce_pack(bounds, lengths)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = rotate_pack(t, bounds, angles, cp_group=ALONE)
        (gradient,) = torch.autograd.grad(output, t, weights)
        packing.unpack(packing.pack(values)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(output, expected)
    assert torch.equal(gradient, expected_gradient)
    assert values.grad is not None
    assert float(values.grad.sum()) == 3 * (4 + 1)
