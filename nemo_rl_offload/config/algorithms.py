"""The algorithms: what the schema, the rules, the command line, the planner and the data ask about each.

A new one of this package has its loop in `algorithms`, its loss in `losses`, its section in `MasterConfig` under its
name, its example, and its entry here. One of another distribution brings the same as a plugin (`plugins.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl_offload.config.plugins import Registry, Spec

_PACKAGE = "nemo_rl_offload.algorithms"


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(Spec):
    """One algorithm; its name is the value of `algorithm` and that of its section."""

    runner: str
    """`"module:function"` of what runs it, with the arguments of `run_offline`; imported only then."""
    loss: str
    """Name in `losses.registry.LOSSES`, or `"module:Class"`."""
    loss_fn_keys: tuple[str, ...] = ()
    """Keys of the section `loss_fn` that the loss takes; without any it takes those of the algorithm's section."""
    learns_from: Literal["responses", "conversations", "pairs"]
    """The policy's own responses to problems, or given conversations, or pairs of a chosen and a rejected answer."""
    has_logprob_passes: bool = False
    """Whether steps compute log-probabilities or logits in forward passes of their own."""
    needs_reference: bool | Callable[[Mapping[str, Any]], bool] = False
    """Whether the start model's weights are needed again and again; may depend on the configuration."""
    needs_teacher: bool = False
    takes_led_episodes: bool = False
    """Whether an environment may lead its episodes and ask for responses itself."""
    metrics: tuple[str, ...]
    """What `checkpointing.metric_name` may be."""
    example: str
    """Configuration that `run` takes without `--config`; a path in the project, or an absolute one."""

    @property
    def generates(self) -> bool:
        """Whether the policy samples responses, which an environment scores."""
        return self.learns_from == "responses"

    @property
    def rows_per_sample(self) -> int:
        """Rows of a batch that make one sample of training."""
        return 2 if self.learns_from == "pairs" else 1

    def keeps_reference(self, config: Mapping[str, Any]) -> bool:
        """Whether a run of this configuration keeps the start model's weights."""
        return self.needs_reference(config) if callable(self.needs_reference) else self.needs_reference

    def copies_reference(self, config: Mapping[str, Any]) -> bool:
        """Whether they are kept as a copy. With adapters the model without them is the reference."""
        return self.keeps_reference(config) and not config["policy"]["megatron_cfg"]["peft"]["enabled"]


def _has_penalty(config: Mapping[str, Any]) -> bool:
    return bool(config["loss_fn"]["reference_policy_kl_penalty"] > 0)


_OF_RESPONSES = ("val:accuracy", "val:reward", "train:reward", "train:loss")

ALGORITHMS = Registry(
    AlgorithmSpec,
    (
        AlgorithmSpec(
            name="grpo",
            takes_led_episodes=True,
            runner=f"{_PACKAGE}.grpo:run_grpo",
            loss="clipped_pg",
            loss_fn_keys=(
                *("reference_policy_kl_penalty", "reference_policy_kl_type"),
                *("kl_input_clamp_value", "kl_output_clamp_value"),
                *("use_kl_in_reward", "use_on_policy_kl_approximation"),
                *("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "use_cispo", "sequence_level_importance_ratios"),
                *("force_on_policy_ratio", "disable_ppo_ratio"),
                "use_importance_sampling_correction",
                *(f"truncated_importance_sampling_{key}" for key in ("type", "ratio", "ratio_min")),
                *("entropy_coeff", "token_level_loss"),
            ),
            learns_from="responses",
            has_logprob_passes=True,
            needs_reference=_has_penalty,
            metrics=_OF_RESPONSES,
            example="examples/configs/grpo_tiny.yaml",
        ),
        AlgorithmSpec(
            name="sft",
            runner=f"{_PACKAGE}.sft:run_sft",
            loss="nll",
            learns_from="conversations",
            metrics=("val:loss", "train:loss"),
            example="examples/configs/sft_tiny.yaml",
        ),
        AlgorithmSpec(
            name="dpo",
            runner=f"{_PACKAGE}.dpo:run_dpo",
            loss="dpo",
            learns_from="pairs",
            has_logprob_passes=True,
            needs_reference=True,
            metrics=("val:accuracy", "val:loss", "train:loss"),
            example="examples/configs/dpo_tiny.yaml",
        ),
        AlgorithmSpec(
            name="distillation",
            runner=f"{_PACKAGE}.distillation:run_distillation",
            loss="distillation",
            loss_fn_keys=("kl_type", "mixed_kl_weight", "zero_outside_topk"),
            learns_from="responses",
            has_logprob_passes=True,
            needs_teacher=True,
            metrics=_OF_RESPONSES,
            example="examples/configs/distillation_tiny.yaml",
        ),
    ),
)
