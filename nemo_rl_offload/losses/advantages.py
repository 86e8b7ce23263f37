"""Group-relative advantages.

A response's advantage is its reward less a baseline, over one divisor a group: the standard deviation of all its
rewards. Rejected: for each sample the deviation of the others alone, to go with the baseline that leaves it out. That
is tiny, or 0, exactly where one response differs from a rest that is nearly uniform, and what is divided by it has no
bound. With the group's deviation an advantage of N samples is at most sqrt(N), or (N - 1) / sqrt(N) with the group's
mean.
"""

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the divisor. Rewards of a group that differ by no more, or by no more than this share of the largest, count
as equal: sums and penalties in float32 round by as much, and dividing by what is left would make signals of it."""


def group_advantages(
    rewards: Tensor, num_generations: int, *, normalize: bool, leave_one_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare each reward with the other rewards for the same prompt.

    The baseline is the mean over the group, without the sample itself when ``leave_one_out`` (RLOO,
    https://arxiv.org/abs/2402.14740); ``std`` is the unbiased standard deviation over the whole group either way.
    ``normalize`` divides by ``std + 1e-6`` (GRPO, https://arxiv.org/abs/2402.03300). A group without signal
    (``has_signal``), such as that of a prompt with a single generation, has advantages and ``std`` 0.

    Args:
        rewards: [B] float, the generations of one prompt next to each other.
        num_generations: generations per prompt; divides B.

    Returns:
        advantages, baseline, std: each [B] float32.
    """
    rewards_GN = _double(rewards).view(-1, num_generations)
    signal_G1 = _has_signal(rewards_GN)[:, None]
    mean_G1 = rewards_GN.mean(dim=1, keepdim=True)
    difference_GN = torch.where(signal_G1, rewards_GN - mean_G1, 0)
    num_others = max(num_generations - 1, 1)
    std_GN = (difference_GN.square().sum(dim=1, keepdim=True) / num_others).sqrt().expand_as(rewards_GN)
    if leave_one_out:
        difference_GN = difference_GN * num_generations / num_others  # to the mean of the others
    advantages_GN = difference_GN / (std_GN + EPSILON) if normalize else difference_GN
    baseline_GN = rewards_GN - difference_GN
    return advantages_GN.flatten().float(), baseline_GN.flatten().float(), std_GN.flatten().float()


def decoupled_advantages(
    parts: Tensor, weights: Tensor, num_generations: int, *, normalize: bool, leave_one_out: bool
) -> Tensor:
    """Compare each of several rewards by itself, as `group_advantages`, and add them up by weight.

    The sum has its mean over the batch taken off, and is divided by its unbiased standard deviation there (GDPO,
    https://arxiv.org/abs/2601.05242, section 3). A sum that rewards of one kind dominate would hide the others: groups
    whose totals are equal have no signal, and those of their parts have.

    Args:
        parts: [B, K] float, the generations of one prompt next to each other; K rewards.
        weights: [K] float.
        num_generations: generations per prompt; divides B.

    Returns:
        advantages: [B] float32.
    """
    sums_B = torch.zeros(len(parts), dtype=torch.float64)
    for part_B, weight in zip(parts.T, weights.tolist(), strict=True):
        compared_B, _, _ = group_advantages(part_B, num_generations, normalize=normalize, leave_one_out=leave_one_out)
        sums_B += weight * compared_B.double()
    centered_B = sums_B - sums_B.mean()
    std = (centered_B.square().sum() / max(len(parts) - 1, 1)).sqrt()
    return (centered_B / std if std > EPSILON else centered_B).float()


def has_signal(rewards_N: Tensor) -> bool:
    """Whether the rewards of one group differ by more than rounding, so that its advantages are not all 0."""
    return bool(_has_signal(_double(rewards_N)))


def _has_signal(rewards_XN: Tensor) -> Tensor:
    spread_X = rewards_XN.amax(dim=-1) - rewards_XN.amin(dim=-1)
    return ~(spread_X <= EPSILON * rewards_XN.abs().amax(dim=-1).clamp(min=1))  # true of NaN, which must show


def _double(rewards: Tensor) -> Tensor:
    """Rewards as float32 has them, in float64 for sums."""
    return rewards.float().double()


def overlong_penalty(lengths: Tensor, longest: int, buffer: int, penalty: float) -> Tensor:
    """What long responses lose: nothing up to ``longest - buffer`` tokens, ``penalty`` from ``longest`` on.

    In between it grows linearly. ``lengths`` [B] int64; returns [B] float32. Source: soft overlong punishment in
    DAPO, https://arxiv.org/abs/2503.14476, equation 13.
    """
    return penalty * ((lengths - (longest - buffer)) / buffer).clamp(0, 1)


def token_advantages(
    rewards: Tensor, num_generations: int, mask: Tensor, *, minus_baseline: bool, kl: Tensor | None
) -> Tensor:
    """REINFORCE++: rewards, less their group's mean with ``minus_baseline``, less ``kl``, normalized over all tokens.

    The mean over tokens becomes 0 and their variance 1; at least 1e-8 is divided by. Source:
    https://arxiv.org/abs/2501.03262.

    Args:
        rewards: [B] float, the generations of one prompt next to each other.
        num_generations: generations per prompt; divides B.
        mask: [B,S] bool, tokens that count.
        kl: [B,S] float, what each token's reward is lowered by; None: nothing.

    Returns:
        [B,S] float32, 0 where ``mask`` is not.
    """
    rewards_GN = _double(rewards).view(-1, num_generations)
    if minus_baseline:
        rewards_GN = rewards_GN - rewards_GN.mean(dim=1, keepdim=True)
    values_BS = rewards_GN.flatten()[:, None].expand(mask.shape)
    if kl is not None:
        values_BS = values_BS - kl.double()
    count = mask.sum().clamp(min=1)
    centered_BS = (values_BS - values_BS.masked_fill(~mask, 0).sum() / count).masked_fill(~mask, 0)
    variance = centered_BS.square().sum() / count
    return (centered_BS * variance.clamp(min=1e-8).rsqrt()).float()


def scaled_rewards(rewards: Tensor, source: tuple[float, float], target: tuple[float, float]) -> Tensor:
    """Clamp ``rewards`` [B] float to the interval ``source`` and map it to ``target``, linearly."""
    (low, high), (target_low, target_high) = source, target
    return target_low + (rewards.clamp(low, high) - low) / (high - low) * (target_high - target_low)
