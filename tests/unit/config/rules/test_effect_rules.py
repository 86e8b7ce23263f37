"""Settings that nothing reads are warned about, and defaults are not."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.loader import BASE, load_config
from nemo_rl_offload.config.rules.effects import EFFECT_WARNINGS, defaults
from nemo_rl_offload.config.validation import CheckedConfig, examine
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
M = "policy.megatron_cfg"
FILES = "data.train.path=README.md data.validation.path=README.md"
SFT = "algorithm=sft checkpointing.metric_name=val:loss checkpointing.higher_is_better=false"
DPO = f"{SFT.replace('sft', 'dpo')} {FILES}"
DISTILLATION = (
    "algorithm=distillation distillation.num_prompts_per_step=128 teacher.model_name=examples/models/tiny_speller"
)
FUNCTION = f"data.env_name=function env.function.path=my:f {FILES}"
SHAPING = "grpo.reward_shaping"


@pytest.mark.parametrize(
    "override",
    [
        "sft.max_num_steps=7",
        "loss_fn.kl_type=forward",
        "teacher.model_name=x",
    ],
)
def test_what_the_algorithm_does_not_read(check: Check, override: str) -> None:
    path, value = override.split("=")
    assert check(override).warnings == [f"{path}: {value} has no effect with algorithm grpo."]


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        ("optimizer_cpu_offload=true", True),
        ("optimizer_cpu_offload=false", False),
        (f"optimizer_cpu_offload=true {SFT}", False),
        ("optimizer_cpu_offload=true M.optimizer.optimizer_offload_fraction=0.5", False),
        ("optimizer_cpu_offload=true M.empty_unused_memory_level=0", False),
    ],
)
def test_an_optimizer_that_waits_on_the_host_does_not_leave_for_it(check: Check, overrides: str, is_told: bool) -> None:
    whole = f"policy.offload_optimizer_for_logprob=true M.empty_unused_memory_level=1 M.optimizer.{overrides}"
    path = "policy.offload_optimizer_for_logprob: true has no effect while"
    assert any(text.startswith(path) for text in check(*whole.replace("M.", f"{M}.").split()).warnings) == is_told


@pytest.mark.parametrize("override", ["env.math.comparison=exact", "env.function.path=a:b", "data.train.split=x"])
def test_what_the_environment_does_not_read(check: Check, override: str) -> None:
    path, value = override.split("=")
    cause = "while data.env_name is reasoning_gym."
    assert check(override).warnings == [f"{path}: {value} has no effect {cause}"]


def test_what_problems_alone_read_is_one_line_where_data_come_from_files(check: Check) -> None:
    (line,) = [line for line in check(*SFT.split(), *FILES.split()).warnings if "data.train.path" in line]
    assert line.endswith(" while data.train.path is given.")
    assert line.startswith("data.validation.size: 200 has no effect, nor have data.validation.exclude, ")
    assert "env.reasoning_gym.task" in line


def test_another_algorithm_reads_other_settings(check: Check) -> None:
    warnings = check(*SFT.split()).warnings
    assert "policy.generation.max_new_tokens: 8 has no effect with algorithm sft." in warnings
    assert "grpo.num_prompts_per_step: 16 has no effect with algorithm sft." in warnings
    unread = {line.split(":")[0] for line in warnings if line.startswith(("env.", "data."))}
    assert unread == {"data.max_input_seq_length"}


@pytest.mark.parametrize(
    ("algorithm", "overrides", "unread"),
    [
        ("sft", SFT, {"generation_batch_size", "logprob_batch_size", "max_input_seq_length"}),
        ("dpo", DPO, {"generation_batch_size", "max_input_seq_length"}),
        ("distillation", DISTILLATION, set()),
    ],
)
def test_sizes_that_an_algorithm_does_not_read(check: Check, algorithm: str, overrides: str, unread: set[str]) -> None:
    sizes = ("policy.generation_batch_size", "policy.logprob_batch_size", "data.max_input_seq_length")
    warnings = check(*overrides.split()).warnings
    found = [line for line in warnings if line.startswith(sizes)]
    assert all(line.endswith(f" has no effect with algorithm {algorithm}.") for line in found)
    assert {line.split(":")[0].rpartition(".")[2] for line in found} == unread


@pytest.mark.parametrize(
    ("overrides", "fix", "switch"),
    [
        (
            f"{M}.optimizer.min_lr=1e-5",
            f"while {M}.scheduler.lr_decay_style is constant. Set that to linear or cosine, or this to 0.0.",
            f"{M}.scheduler.lr_decay_style=cosine",
        ),
        (
            "loss_fn.truncated_importance_sampling_ratio=2",
            "while loss_fn.use_importance_sampling_correction is false. Set that to true, or this to null.",
            "loss_fn.use_importance_sampling_correction=true",
        ),
        (
            "grpo.dynamic_sampling_max_gen_batches=3",
            "while grpo.use_dynamic_sampling is false. Set that to true, or this to 10.",
            "grpo.use_dynamic_sampling=true",
        ),
        (
            f"{SHAPING}.overlong_buffer_length=4",
            f"while {SHAPING}.enabled is false. Set that to true, or this to 64.",
            f"{SHAPING}.enabled=true",
        ),
        (
            f"{SHAPING}.overlong_buffer_penalty=2.0",
            f"while {SHAPING}.enabled is false. Set that to true, or this to 1.0.",
            f"{SHAPING}.enabled=true {SHAPING}.overlong_buffer_length=4",
        ),
        (
            f"{SHAPING}.max_response_length=100",
            f"while {SHAPING}.enabled is false. Set that to true, or this to null.",
            f"{SHAPING}.enabled=true",
        ),
        (
            "grpo.adv_estimator.minus_baseline=false",
            "while grpo.adv_estimator.name is grpo. Set that to reinforce_plus_plus, or this to true.",
            "grpo.adv_estimator.name=reinforce_plus_plus",
        ),
        (
            "grpo.max_rollout_turns=3",
            "while data.env_name is reasoning_gym. Set that to function, or this to 1.",
            FUNCTION,
        ),
        (
            "policy.generation.colocated.resources.gpus_per_node=2",
            "while policy.generation.colocated.enabled is true. Set that to false, or this to null.",
            "policy.generation.colocated.enabled=false cluster.gpus_per_node=4",
        ),
    ],
)
def test_what_another_key_switches_off(check: Check, overrides: str, fix: str, switch: str) -> None:
    path, value = overrides.split("=")
    (warning,) = check(overrides).warnings
    assert warning == f"{path}: {float(value) if 'e-' in value else value} has no effect {fix}"
    assert not [line for line in check(overrides, *switch.split(), run_here=False).warnings if line.startswith(path)]


@pytest.mark.parametrize(
    ("settings", "switch"),
    [
        (["policy.sequence_packing.algorithm=concatenative"], "policy.sequence_packing.enabled=true"),
        (["policy.dynamic_batching.sequence_length_round=8"], "policy.dynamic_batching.enabled=true"),
        (
            [
                "policy.sequence_packing.algorithm=concatenative",
                "policy.sequence_packing.train_mb_tokens=512",
                "policy.sequence_packing.logprob_mb_tokens=512",
            ],
            "policy.sequence_packing.enabled=true",
        ),
        ([f"{M}.optimizer.sgd_momentum=0.5"], f"{M}.optimizer.optimizer=sgd"),
        ([f"{M}.cpu_affinity.map={{0: 0}}", f"{M}.cpu_affinity.bind_memory=false"], f"{M}.cpu_affinity.enabled=true"),
        (["logger.wandb.name=x", "logger.wandb.project=y"], "logger.wandb_enabled=true"),
        (["checkpointing.save_period=25", "checkpointing.is_async=true"], "checkpointing.enabled=true"),
        (["loss_fn.reference_policy_kl_type=k1"], "loss_fn.reference_policy_kl_penalty=0.1"),
        (
            [
                *("loss_fn.reference_policy_kl_type=k1", "loss_fn.kl_input_clamp_value=5.0"),
                *("loss_fn.kl_output_clamp_value=null", "loss_fn.use_on_policy_kl_approximation=true"),
            ],
            "loss_fn.reference_policy_kl_penalty=0.1",
        ),
        (
            ["grpo.reward_scaling.source_max=2.0", "grpo.reward_scaling.target_min=-1.0"],
            "grpo.reward_scaling.enabled=true",
        ),
        (
            [f"{M}.activation_offload.host_memory_budget=1GiB", f"{M}.activation_offload_fraction=0.5"],
            f"{M}.fine_grained_activation_offloading=true",
        ),
        ([f"{M}.moe_paged_stash_page_size=32"], f"{M}.moe_paged_stash=true"),
    ],
)
def test_settings_that_share_a_switch_share_a_line(check: Check, settings: list[str], switch: str) -> None:
    path, off = switch.split("=")[0], {"true": "false", "sgd": "adam", "0.1": "0.0"}[switch.split("=")[1]]
    paths = [setting.split("=")[0] for setting in settings]
    (line,) = [line for line in check(*settings, f"{path}={off}").warnings if "has no effect" in line]
    assert path in line
    assert all(each in line for each in paths)
    with contextlib.suppress(ConfigError):  # the tiny model has no experts
        warnings = check(*settings, switch, run_here=False).warnings
        assert not [line for line in warnings if line.startswith(tuple(paths))]


@pytest.mark.parametrize("switch", ["force_on_policy_ratio", "disable_ppo_ratio"])
def test_bounds_of_a_ratio_that_binds_nowhere(switch: str, check: Check) -> None:
    one_update = ("policy.train_global_batch_size=128", "grpo.num_prompts_per_step=32")
    bounds = (*one_update, "grpo.num_generations_per_prompt=4", "loss_fn.ratio_clip_min=0.1")
    assert not [line for line in check(*bounds).warnings if "ratio_clip_min" in line]
    (line,) = [line for line in check(*bounds, f"loss_fn.{switch}=true").warnings if "ratio_clip_min" in line]
    assert f"has no effect while loss_fn.{switch} is true. Set that to false" in line


def test_a_default_that_is_a_product(check: Check) -> None:
    """The samples of a microbatch times the longest of them."""
    section = "policy.dynamic_batching"
    sizes = ("policy.max_total_sequence_length=96", "policy.train_micro_batch_size=2")
    assert check(*sizes, f"{section}.train_mb_tokens=192").warnings == []
    (warning,) = check(*sizes, f"{section}.train_mb_tokens=256").warnings
    off = f"while {section}.enabled is false. Set that to true, or this to 192."
    assert warning == f"{section}.train_mb_tokens: 256 has no effect {off}"


def test_tokens_of_a_pass_that_the_algorithm_lacks(check: Check) -> None:
    on, tokens = "policy.dynamic_batching.enabled=true", "policy.dynamic_batching.logprob_mb_tokens"
    warnings = check(*SFT.split(), on, f"{tokens}=4096").warnings
    assert f"{tokens}: 4096 has no effect with algorithm sft." in warnings
    assert not [line for line in check(*SFT.split(), on).warnings if tokens in line]


@pytest.mark.parametrize(
    ("setting", "switch"),
    [("loss_fn.mixed_kl_weight=0.2", "loss_fn.kl_type=mixed"), ("distillation.max_rollout_turns=2", FUNCTION)],
)
def test_what_another_key_switches_off_in_distillation(check: Check, setting: str, switch: str) -> None:
    def warnings(*overrides: str) -> list[str]:
        found = check(*DISTILLATION.split(), setting, *overrides, run_here=False).warnings
        return [line for line in found if line.startswith(setting.split("=")[0])]

    (warning,) = warnings("loss_fn.kl_type=forward")
    assert "has no effect while" in warning
    assert warnings(*switch.split()) == []
    (warning,) = check(setting).warnings
    assert warning.endswith("has no effect with algorithm grpo."), "one reason is enough"


@pytest.mark.parametrize(
    ("setting", "off", "on"),
    [
        ("lr_warmup_init=1e-5", "lr_warmup_iters=0", "lr_warmup_iters=5"),
        ("lr_decay_iters=50", "lr_decay_style=constant", "lr_decay_style=linear"),
        ("lr_decay_iters=50", "lr_decay_style=constant", "weight_decay_incr_style=linear end_weight_decay=0.5"),
        ("weight_decay_incr_style=linear", "end_weight_decay=null", "end_weight_decay=0.5"),
    ],
)
def test_a_phase_that_the_schedule_lacks(check: Check, setting: str, off: str, on: str) -> None:
    def warnings(*overrides: str) -> list[str]:
        return check(*(f"{M}.scheduler.{override}" for override in overrides)).warnings

    (warning,) = warnings(setting, off)
    assert warning.startswith(f"{M}.scheduler.{setting.split('=')[0]}: ")
    assert "has no effect w" in warning
    assert warnings(setting, *on.split()) == []
    assert warnings(off) == []


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("batch_p2p_comm=false", "pipeline_model_parallel_size is 1. Set this to true."),
        ("cuda_graph_warmup_steps=7", "cuda_graph_impl is none. Set this to 3."),
        ("optimizer.optimizer_offload_fraction=0.5", "optimizer.optimizer_cpu_offload is false. Set this to 1.0."),
    ],
)
def test_what_no_other_value_turns_on(check: Check, setting: str, why: str) -> None:
    (warning,) = check(f"{M}.{setting}").warnings
    key, _, value = setting.partition("=")
    assert warning.startswith(f"{M}.{key}: {value} has no effect while {M}.{why}")
    two = f"{M}.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2"
    assert not any("batch_p2p" in line for line in check(f"{M}.batch_p2p_comm=false", *two).warnings)


def test_a_metric_that_is_never_measured(check: Check) -> None:
    off = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"]
    (warning,) = check(*off, "checkpointing.metric_name=val:reward").warnings
    assert warning == (
        "checkpointing.metric_name: val:reward has no effect while validation is off: the latest checkpoints are kept. "
        "Set grpo.val_at_end=true, or this to train:loss."
    )
    quiet = [off, [*off, "checkpointing.metric_name=train:reward"], [*off[:2], "checkpointing.metric_name=val:reward"]]
    assert [check(*overrides).warnings for overrides in quiet] == [[], [], []]


def test_checkpoints_of_steps_without_a_validation(check: Check) -> None:
    given = ["grpo.max_num_steps=30", "grpo.val_period=10", "checkpointing.save_period=15"]
    (warning,) = check(*given).warnings
    assert warning == (
        "checkpointing.save_period: 15 is no multiple of grpo.val_period, 10: checkpoints of steps without a "
        "validation are ranked behind all others. Set it to 20, or set checkpointing.metric_name=null."
    )
    (warning,) = check("grpo.max_num_steps=30", "grpo.val_period=50", "checkpointing.save_period=15").warnings
    assert "Set grpo.val_period to 15, or set" in warning
    for quiet in (
        "checkpointing.save_period=20",
        "checkpointing.save_period=30",
        "grpo.val_period=5",
        "grpo.val_period=0",
        "grpo.max_num_steps=15",
        "checkpointing.keep_top_k=null",
        "checkpointing.metric_name=train:reward",
        "checkpointing.metric_name=null",
    ):
        assert check(*given, quiet).warnings == [], quiet


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_defaults_are_not_warned_about(algorithm: str) -> None:
    values = load_config(BASE, ["policy.model_name=x", f"algorithm={algorithm}"])

    def get(path: str) -> Any:
        node: Any = values
        for part in path.split("."):
            node = node[part]
        return node

    assert [line for rule in EFFECT_WARNINGS for line in rule(get)] == []
    assert defaults()["policy.model_name"] == "???"


def test_a_wrong_value_hides_no_warning_about_another(tiny: Callable[..., dict[str, Any]]) -> None:
    raw = tiny("grpo.use_dynamic_sampling=maybe", f"{SHAPING}.max_response_length=100", "sft.max_num_steps=7")
    warnings = examine(raw, run_here=False).warnings
    assert [warning.path for warning in warnings] == ["sft.max_num_steps", f"{SHAPING}.max_response_length"]
