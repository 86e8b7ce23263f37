"""Rules about the algorithms: what breaks each, the essential words, a legal neighbor."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
Refuses = Callable[[str, str, str, str], None]
BY_LOSS = "checkpointing.metric_name=val:loss checkpointing.higher_is_better=false"
SFT, DPO = f"algorithm=sft {BY_LOSS}", f"algorithm=dpo {BY_LOSS}"
FILES = "data.train.path=README.md data.validation.path=README.md"
DISTILLATION = "algorithm=distillation distillation.num_prompts_per_step=128"

MATH = "data.env_name=math"
FUNCTION = "data.env_name=function"
CASES = [
    (
        "policy.train_global_batch_size=256",
        "policy.train_global_batch_size",
        "Set 128 for one update per step",
        "grpo.num_prompts_per_step=32",
    ),
    (
        "algorithm=distillation teacher.model_name=DENSE distillation.num_prompts_per_step=100",
        "policy.train_global_batch_size",
        "distillation.num_prompts_per_step x num_generations_per_prompt = 100 x 1",
        "distillation.num_prompts_per_step=256",
    ),
    (
        "grpo.num_generations_per_prompt=1 grpo.num_prompts_per_step=128",
        "grpo.num_generations_per_prompt",
        "at least 2 while use_leave_one_out_baseline",
        "grpo.use_leave_one_out_baseline=false",
    ),
    (
        "grpo.num_generations_per_prompt=1 grpo.num_prompts_per_step=128 grpo.use_leave_one_out_baseline=false "
        "grpo.use_dynamic_sampling=true",
        "grpo.num_generations_per_prompt",
        "at least 2 while use_dynamic_sampling",
        "grpo.use_dynamic_sampling=false",
    ),
    ("grpo.batch_multiplier=2", "grpo.batch_multiplier", "nothing uses", "grpo.use_dynamic_sampling=true"),
    (
        "grpo.reward_shaping.enabled=true",
        "grpo.reward_shaping.overlong_buffer_length",
        "64 is above max_response_length 8",
        "grpo.reward_shaping.overlong_buffer_length=8",
    ),
    (
        "loss_fn.sequence_level_importance_ratios=true",
        "loss_fn.token_level_loss",
        "must be false while sequence_level_importance_ratios",
        "loss_fn.token_level_loss=false",
    ),
    ("loss_fn.use_cispo=true loss_fn.ratio_clip_c=3", "loss_fn.ratio_clip_c", "null", "loss_fn.ratio_clip_c=null"),
    (DISTILLATION, "teacher.model_name", "missing value. Give one", "teacher.model_name=DENSE"),
    ("data.train.path=x", "data.train.path", "takes its problems from env.reasoning_gym", "data.train.path=null"),
    ("data.train.path=x", "data.train.path", "Set it to null, or data.env_name to math or function", f"{MATH} {FILES}"),
    (MATH, "data.train.path", "data.env_name math takes problems from a file", FILES),
    (f"{MATH} data.train.path=x", "data.validation.path", "turn validation off", FILES),
    (f"{FUNCTION} {FILES}", "env.function.path", "missing value. Give one", "env.function.path=my.scores:by_length"),
    (
        f"{FUNCTION} {FILES} env.function.path=my/scores.py",
        "env.function.path",
        "names no function. Write it as package.module:name",
        "env.function.path=scores:by_length",
    ),
    (DPO, "data.train.path", "takes preference pairs from a file", FILES),
    (
        f"{SFT} data.train.path=README.md",
        "data.validation.path",
        "sft.val_period=0 sft.val_at_start=false sft.val_at_end=false",
        "sft.val_period=0 sft.val_at_start=false sft.val_at_end=false",
    ),
    (f"{SFT} data.validation.path=README.md", "data.train.path", "data.validation.path is given", FILES),
    ("algorithm=sft", "checkpointing.metric_name", "sft has no val:accuracy. Allowed: val:loss", BY_LOSS),
    (
        "algorithm=sft checkpointing.metric_name=val:loss",
        "checkpointing.higher_is_better",
        "the worst checkpoints by val:loss. Set it to false",
        "checkpointing.higher_is_better=false",
    ),
    (
        "checkpointing.higher_is_better=false",
        "checkpointing.higher_is_better",
        "Set it to true",
        "checkpointing.metric_name=train:loss",
    ),
    ("env.reasoning_gym.task=null", "env.reasoning_gym.task", "missing value", f"{SFT} {FILES}"),
    (
        f"{SFT} sft.max_num_steps=5 policy.megatron_cfg.scheduler.lr_decay_style=linear",
        "policy.megatron_cfg.scheduler.lr_warmup_iters",
        "5 is not below lr_decay_iters, 5",
        "sft.max_num_steps=6",
    ),
]


@pytest.mark.parametrize(("broken", "path", "words", "legal"), CASES)
def test_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(broken, path, words, legal)


def test_files_and_teacher_must_exist(check: Check, dense_model: Path) -> None:
    sft = [*SFT.split(), f"policy.model_name={dense_model}"]
    with pytest.raises(ConfigError, match=r"\ndata\.train\.path: 'no/such' is not there \(looked in /"):
        check(*sft, "data.train.path=no/such", "data.validation.path=README.md")
    teacher = [*DISTILLATION.split(), f"policy.model_name={dense_model}", "teacher.model_name=no/such"]
    with pytest.raises(ConfigError, match=r"\nteacher\.model_name: 'no/such' is not a local"):
        check(*teacher)
    assert len(check(*teacher, run_here=False).warnings) >= 1
