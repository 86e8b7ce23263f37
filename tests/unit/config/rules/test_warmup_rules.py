"""The learning rate's warm-up against the optimizer steps of the run."""

from collections.abc import Callable

import pytest

from nemo_rl_offload.config.validation import CheckedConfig

Check = Callable[..., CheckedConfig]
Refusals = Callable[[str], list[str]]
M = "policy.megatron_cfg"


@pytest.mark.parametrize(
    ("overrides", "num_updates"),
    [
        ("grpo.max_num_steps=5", 5),
        ("grpo.max_num_steps=2 grpo.num_prompts_per_step=32 policy.megatron_cfg.scheduler.lr_warmup_iters=4", 4),
        ("grpo.max_num_steps=2 grpo.ppo_epochs=2", 4),
        (
            "grpo.max_num_steps=5 policy.megatron_cfg.scheduler.lr_decay_style=linear "
            "policy.megatron_cfg.scheduler.lr_decay_iters=9",
            5,
        ),
    ],
)
def test_a_warmup_that_never_ends(check: Check, overrides: str, num_updates: int) -> None:
    (warning,) = check(*overrides.split()).warnings
    assert warning.startswith(f"{M}.scheduler.lr_warmup_iters: ")
    assert f" is not below {num_updates}, the updates of the run" in warning


def test_a_warmup_is_compared_with_updates(check: Check, refusals: Refusals) -> None:
    """A step may have several updates, which the learning rate follows."""
    many = "grpo.max_num_steps=2 grpo.num_prompts_per_step=48 policy.megatron_cfg.scheduler.lr_decay_style=linear"
    assert check(*many.split()).warnings == []
    (line,) = refusals(f"{many} grpo.num_prompts_per_step=32")
    assert "5 is not below lr_decay_iters, 4 (null: updates of the run)" in line
