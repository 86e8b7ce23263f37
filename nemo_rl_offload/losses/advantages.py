"""Group-relative advantages."""

import torch
from torch import Tensor

EPSILON = 1e-6


def group_advantages(
    rewards: Tensor, num_generations: int, *, normalize: bool, leave_one_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare each reward with the other rewards for the same prompt.

    The baseline is the mean over the group, without the sample itself when ``leave_one_out`` (RLOO,
    https://arxiv.org/abs/2402.14740); ``std`` is the unbiased standard deviation over the same samples.
    ``normalize`` divides by ``std + 1e-6`` (GRPO, https://arxiv.org/abs/2402.03300), except where ``std`` is
    0: such samples keep their plain difference, which is 0 unless a sample alone differs from a uniform rest.
    A prompt with a single generation gives advantage 0.

    Float32 rewards are averaged in float64, where the mean of equal rewards is exact. In float32, equal
    rewards can keep a tiny deviation, and dividing by it makes enormous advantages.

    Args:
        rewards: [B] float, the generations of one prompt next to each other.
        num_generations: generations per prompt; divides B.

    Returns:
        advantages, baseline, std: each [B] float32.
    """
    rewards_GN = rewards.float().double().view(-1, num_generations)
    if num_generations == 1:
        return torch.zeros_like(rewards).float(), rewards.float(), torch.zeros_like(rewards).float()
    weights_NN = torch.ones(num_generations, num_generations, dtype=torch.float64, device=rewards.device)
    if leave_one_out:
        weights_NN.fill_diagonal_(0)
    num_compared = num_generations - int(leave_one_out)
    baseline_GN = rewards_GN @ weights_NN / num_compared
    squares_GNN = (rewards_GN[:, None, :] - baseline_GN[:, :, None]).square() * weights_NN
    std_GN = (squares_GNN.sum(-1) / max(num_compared - 1, 1)).sqrt()
    advantages_GN = rewards_GN - baseline_GN
    if normalize:
        advantages_GN = torch.where(std_GN > 0, advantages_GN / (std_GN + EPSILON), advantages_GN)
    return advantages_GN.flatten().float(), baseline_GN.flatten().float(), std_GN.flatten().float()


def has_signal(rewards_N: Tensor) -> bool:
    """Whether the rewards of one group differ, so that its advantages are not all 0."""
    return bool((rewards_N != rewards_N[0]).any())


def overlong_penalty(lengths: Tensor, longest: int, buffer: int, penalty: float) -> Tensor:
    """What long responses lose: nothing up to ``longest - buffer`` tokens, ``penalty`` from ``longest`` on.

    In between it grows linearly. ``lengths`` [B] int64; returns [B] float32. Source: soft overlong punishment in
    DAPO, https://arxiv.org/abs/2503.14476, equation 13.
    """
    return penalty * ((lengths - (longest - buffer)) / buffer).clamp(0, 1)
