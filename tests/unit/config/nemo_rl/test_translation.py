"""What NeMo-RL's keys become here."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from nemo_rl_offload.cli import command_line as cli
from nemo_rl_offload.cli.check import check_file
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.schema import FurtherTrainingDataConfig
from nemo_rl_offload.config.sources import LoadedConfig
from nemo_rl_offload.config.types import defaults_of
from nemo_rl_offload.config.validation import examine

M = "policy.megatron_cfg"
ANY_MODELS_MTP = "{mtp_num_layers: 0, mtp_loss_scaling_factor: 0.0, mtp_detach_heads: false, moe_grouped_gemm: true}"
TRAINED_MTP = "{mtp_num_layers: 1, mtp_loss_scaling_factor: 0.3, mtp_detach_heads: true, moe_grouped_gemm: true}"
FLEX = "moe_token_dispatcher_type: flex"
HYBRIDEP = "moe_hybridep_num_sms: 32, hybridep_num_ranks_per_nvlink_domain: 8, hybridep_use_mnnvl: false"
BY_DTENSOR = """
sft: {max_num_steps: 60, max_num_epochs: 1, val_batches: 4, val_global_batch_size: 8}
policy:
  model_name: Qwen/Qwen3-30B-A3B
  tokenizer: {name: "${policy.model_name}"}
  max_grad_norm: null
  dtensor_cfg:
    {enabled: true, tensor_parallel_size: 2, context_parallel_size: 1, expert_parallel_size: 4,
    sequence_parallel: false, activation_checkpointing: true, cpu_offload: false, env_vars: {A: "", B: b}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 3.0e-5, betas: [0.9, 0.98], eps: 1.0e-5, foreach: false}}
  scheduler: null
  megatron_cfg:
    {enabled: false, freeze_moe_router: true, moe_aux_loss_coeff: 0.5, pipeline_model_parallel_size: 8,
    optimizer: {lr: 1.0, clip_grad: 3.0, adam_beta1: 0.5}}
data: {train: {dataset_name: tulu3_sft_mixture}, validation: null, add_bos: true}
checkpointing: {metric_name: "val:val_loss", higher_is_better: false, checkpoint_dir: results/mine}
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., LoadedConfig]:
    def read_text(text: str, *overrides: str) -> LoadedConfig:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return read_recipe(path, overrides)

    return read_text


def value(loaded: LoadedConfig, path: str) -> Any:
    node: Any = loaded.values
    for part in path.split("."):
        node = node[part]
    return node


def test_a_recipe_for_dtensor(read: Callable[..., LoadedConfig], tmp_path: Path) -> None:
    loaded = read(BY_DTENSOR)
    wanted = {
        "algorithm": "sft",
        f"{M}.enabled": True,
        f"{M}.tensor_model_parallel_size": 2,
        f"{M}.expert_model_parallel_size": 4,
        f"{M}.pipeline_model_parallel_size": 1,
        f"{M}.sequence_parallel": True,  # experts need it
        f"{M}.activation_checkpointing": True,
        f"{M}.freeze_moe_router": False,
        f"{M}.moe_aux_loss_coeff": None,
        f"{M}.env_vars": {"B": "b"},
        f"{M}.optimizer.lr": 3e-5,
        f"{M}.optimizer.adam_beta1": 0.9,
        f"{M}.optimizer.adam_beta2": 0.98,
        f"{M}.optimizer.adam_eps": 1e-5,
        f"{M}.optimizer.weight_decay": 0.01,
        f"{M}.optimizer.clip_grad": 0.0,
        f"{M}.scheduler.lr_warmup_iters": 0,
        f"{M}.scheduler.lr_decay_style": "constant",
        "sft.max_val_samples": 32,
        "data.train.path": "hf://datasets/allenai/tulu-3-sft-mixture",
        "data.train.split_validation_size": 0.05,
        "data.add_bos": True,
        "checkpointing.metric_name": "val:loss",
        "checkpointing.checkpoint_dir": "results/mine",
    }
    assert {path: value(loaded, path) for path in wanted} == wanted
    assert loaded.refused == {}
    (note,) = loaded.notes
    assert note.startswith("policy.dtensor_cfg: NeMo-RL trains this recipe with DTensor; here Megatron-Core")
    assert {f"{M}.freeze_moe_router", "policy.dtensor_cfg.cpu_offload"} <= loaded.without_effect.keys()
    found = check_file(tmp_path / "recipe.yaml", ["cluster.gpus_per_node=8"])
    assert found.problems == []


def test_what_the_command_line_gives_counts_before_the_translation(read: Callable[..., LoadedConfig]) -> None:
    loaded = read(
        BY_DTENSOR,
        f"{M}.fine_grained_activation_offloading=true",
        f"{M}.offload_modules=[core_attn]",
        f"{M}.optimizer.lr=0.5",
        f"{M}.freeze_moe_router=true",
        f"{M}.tensor_model_parallel_size=4",
    )
    assert [value(loaded, f"{M}.{key}") for key in ("fine_grained_activation_offloading", "offload_modules")] == [
        True,
        ["core_attn"],
    ]
    assert value(loaded, f"{M}.optimizer.lr") == 0.5
    assert value(loaded, f"{M}.freeze_moe_router") is True
    assert value(loaded, f"{M}.tensor_model_parallel_size") == 4


WARMUP = {
    "name": "torch.optim.lr_scheduler.LinearLR",
    "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 5},
}
SCHEDULES: dict[str, tuple[list[Any], Callable[[torch.optim.Optimizer], LRScheduler]]] = {
    "constant": (
        [
            WARMUP,
            {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10**10}},
            {"milestones": [5]},
        ],
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 5), ConstantLR(o, 1.0, 10**10)], [5]),
    ),
    "cosine": (
        [
            WARMUP,
            {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 20, "eta_min": 1e-3}},
            {"milestones": [5]},
        ],
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 5), CosineAnnealingLR(o, 20, 1e-3)], [5]),
    ),
    "line": (
        [
            {
                "name": "torch.optim.lr_scheduler.LinearLR",
                "kwargs": {"start_factor": 1.0, "end_factor": 0.5, "total_iters": 20},
            }
        ],
        lambda o: LinearLR(o, 1.0, 0.5, 20),
    ),
    "warm-up alone": ([WARMUP], lambda o: LinearLR(o, 0.1, 1.0, 5)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_pytorchs(name: str, read: Callable[..., LoadedConfig]) -> None:
    """PyTorch's own learning rates, step by step, beside those of Megatron-Core's scheduler."""
    from nemo_rl_offload.megatron.build.optimizer import learning_rate_scheduler

    text, build = SCHEDULES[name]
    recipe = yaml.safe_load(BY_DTENSOR)
    recipe["policy"]["scheduler"] = text
    recipe["policy"]["optimizer"]["kwargs"]["lr"] = 0.1
    recipe["sft"]["max_num_steps"] = 24
    loaded = read(yaml.safe_dump(recipe))
    assert loaded.refused == {}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    theirs = build(optimizer)
    group: dict[str, Any] = {"params": [], "lr": 0.0, "weight_decay": 0.0}
    ours = learning_rate_scheduler(loaded.values["policy"], type("O", (), {"param_groups": [group]})(), 24)
    for step in range(24):
        assert group["lr"] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), step
        optimizer.step()
        theirs.step()
        ours.step(1)


def test_transformer_engines_adam(read: Callable[..., LoadedConfig]) -> None:
    """Its own defaults; how it keeps weights and averages does not count."""
    recipe = yaml.safe_load(BY_DTENSOR)
    name = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
    kept = {"master_weights": True, "store_param_remainders": True, "exp_avg_dtype": "torch.bfloat16"}
    recipe["policy"]["optimizer"] = {"name": name, "kwargs": {"lr": 2e-6, "adam_w_mode": True, **kept}}
    loaded = read(yaml.safe_dump(recipe))
    assert loaded.refused == {}
    keys = ("optimizer", "lr", "weight_decay", "adam_beta2", "adam_eps")
    assert [value(loaded, f"{M}.optimizer.{key}") for key in keys] == ["adam", 2e-6, 0.0, 0.999, 1e-8]
    assert {f"policy.optimizer.kwargs.{key}" for key in kept} <= loaded.without_effect.keys()
    recipe["policy"]["optimizer"]["kwargs"]["adam_w_mode"] = False
    assert "policy.optimizer.kwargs.adam_w_mode" in read(yaml.safe_dump(recipe)).refused


@pytest.mark.parametrize(
    ("change", "path", "text"),
    [
        ({"scheduler": [{"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 3}}]}, "policy.scheduler", "StepLR; there are LinearLR"),  # noqa: E501
        ({"scheduler": [WARMUP, WARMUP]}, "policy.scheduler", "2 phases with 0 milestones"),
        ({"scheduler": {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 10}}}, "policy.scheduler", "rises again after 10 of 60"),  # noqa: E501
        ({"optimizer": {"name": "torch.optim.RMSprop", "kwargs": {}}}, "policy.optimizer.name", "Set it to torch.optim.AdamW"),  # noqa: E501
        ({"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"amsgrad": True}}}, "policy.optimizer.kwargs.amsgrad", "Remove it: ~policy.optimizer.kwargs.amsgrad"),  # noqa: E501
        ({"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": "x"}}}, "policy.optimizer.kwargs.lr", '"x" is not allowed. Allowed: a number'),  # noqa: E501
        ({"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"betas": [0.9]}}}, "policy.optimizer.kwargs.betas", "two numbers"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_refused(
    change: dict[str, Any], path: str, text: str, read: Callable[..., LoadedConfig]
) -> None:
    recipe = yaml.safe_load(BY_DTENSOR)
    recipe["policy"] |= change
    assert text in read(yaml.safe_dump(recipe)).refused[path]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("grpo: {adv_estimator: {name: grpo, normalize_rewards: false}}", {"grpo.normalize_rewards": False}),
        ("grpo: {val_period: -7}", {"grpo.val_period": -7}),  # which the schema refuses
        ("grpo: {val_period: -1, max_val_samples: null}", {"grpo.val_period": 0, "grpo.max_val_samples": 1 << 40}),
        ("grpo: {}\npolicy: {megatron_cfg: {checkpoint: {async_save: true}}}", {"checkpointing.is_async": True}),
        (
            "grpo: {}\npolicy: {hf_config_overrides: {router_aux_loss_coef: 0.0}}",
            {f"{M}.moe_aux_loss_coeff": 0.0, "policy.hf_config_overrides": {}},
        ),
        (
            "grpo: {}\npolicy: {model_name: deepseek-ai/DeepSeek-V3, megatron_cfg: {mtp_num_layers: 0}}",
            {f"{M}.model_overrides": {}, f"{M}.mtp_num_layers": 0},
        ),
        (  # as runs of an earlier version have it, which go on so
            f"grpo: {{}}\npolicy: {{model_name: Qwen/Qwen3-8B, megatron_cfg: {ANY_MODELS_MTP}}}",
            {f"{M}.mtp_num_layers": None, f"{M}.mtp_loss_scaling_factor": None, f"{M}.mtp_detach_heads": None},
        ),
        (
            f"grpo: {{}}\npolicy: {{model_name: deepseek-ai/DeepSeek-V3, megatron_cfg: {TRAINED_MTP}}}",
            {f"{M}.mtp_num_layers": None, f"{M}.mtp_loss_scaling_factor": 0.3, f"{M}.mtp_detach_heads": True},
        ),
        (
            f"grpo: {{}}\npolicy: {{megatron_cfg: {{{FLEX}, moe_enable_deepep: true}}}}",
            {f"{M}.moe_flex_dispatcher_backend": "deepep", f"{M}.env_vars": None, f"{M}.model_overrides": {}},
        ),
        (
            f"grpo: {{}}\npolicy: {{megatron_cfg: {{{FLEX}, moe_flex_dispatcher_backend: hybridep, {HYBRIDEP}}}}}",
            {
                f"{M}.env_vars": {"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "8", "USE_MNNVL": "0"},
                f"{M}.model_overrides": {"moe_flex_dispatcher_num_sms": 32},
            },
        ),
        (
            f"grpo: {{}}\npolicy: {{megatron_cfg: {{moe_enable_deepep: false, {HYBRIDEP}}}}}",
            {f"{M}.moe_flex_dispatcher_backend": None, f"{M}.env_vars": None, f"{M}.model_overrides": {}},
        ),
        ("dpo: {val_batches: -1, val_global_batch_size: 8}", {"algorithm": "dpo", "dpo.max_val_samples": 1 << 40}),
        ("grpo: {}\ndata: {max_input_seq_length: null}", {"data.max_input_seq_length": 512}),
        ("grpo: {}\npolicy: {hf_config_overrides: null}", {"policy.hf_config_overrides": {}}),
        ("grpo: {}\nteacher: null", {"teacher.model_name": None}),
        ("grpo: {}\ndata: {train: [{path: x}]}", {"data.train.path": "x"}),
        (
            "grpo: {}\ndata: {train: {dataset_name: Tulu3Preference, max_samples: 5}, validation: {path: x, max_samples: 0}}",  # noqa: E501
            {"data.train.max_samples": 5, "data.validation.max_samples": None},
        ),
        ("grpo: {}\npolicy: {megatron_cfg: {optimizer: {clip_grad: null}}}", {f"{M}.optimizer.clip_grad": 0.0}),
    ],
)
def test_other_keys(text: str, wanted: dict[str, Any], read: Callable[..., LoadedConfig]) -> None:
    loaded = read(text)
    assert loaded.refused == {}
    assert {path: value(loaded, path) for path in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("grpo: {}\nsft: {}", "algorithm", "there are sections for grpo and sft. Give algorithm=NAME"),
        ("grpo: {skip_reference_policy_logprobs_calculation: true}", "grpo.skip_reference_policy_logprobs_calculation", "Set that to 0"),  # noqa: E501
        ("grpo: {}\npolicy: {generation: {backend: sglang}}", "policy.generation.backend", "generation by SGLang, not"),
        ("grpo: {}\npolicy: {generation: {backend: trtllm}}", "policy.generation.backend", "Set it to vllm or megatron."),  # noqa: E501
        ("grpo: {}\npolicy: {dtensor_cfg: {enabled: true}, megatron_cfg: {enabled: true}}", "policy.dtensor_cfg.enabled", "one of the two trains"),  # noqa: E501
        ("grpo: {}\ndata: {train: []}", "data.train", "Allowed: a section of keys, or a list of such sections"),
        ("grpo: {}\ndata: {train: [{path: x}, 3]}", "data.train", "Allowed: a section of keys, or a list"),
        ("grpo: {}\ndata: {train: [{path: x}, {pth: y}]}", "data.train.1.pth", "Did you mean 'path'?"),
        ("grpo: {}\ndata: {train: [{path: x}, {split: y}]}", "data.train.1.path", "missing value"),
        ("grpo: {}\ndata: {train: [{path: x}, {path: y, size: 3}]}", "data.train.1.size", "unknown key in a list"),
        ("grpo: {}\ndata: {train: [{path: x}, {dataset_name: gsm9k}]}", "data.train.1.dataset_name", "Did you mean 'gsm8k'?"),  # noqa: E501
        ("grpo: {}\ndata: {train: [{path: x, prompt_file: a}, {path: y, prompt_file: b}]}", "data.train.1.prompt_file", "Give all the same"),  # noqa: E501
        ("grpo: {}\ndata: {train: {path: x, further: [{path: y, size: 3}]}}", "data.train.further.0.size", "unknown key in a list"),  # noqa: E501
        ("grpo: {}\ndata: {train: {path: x, further: [{path: y}, {split: z}]}}", "data.train.further.1.path", "missing value"),  # noqa: E501
        ("grpo: {}\ndata: {train: {path: x, further: [{pth: y}]}}", "data.train.further.0.pth", "Did you mean 'path'?"),
        *((f"sft: {{}}\npolicy: {{megatron_cfg: {{peft: {{{key}: 4}}}}}}", f"{M}.peft.{key}", f"Here it is {M}.peft.{there}")  # noqa: E501
          for key, there in (("rank", "dim"), ("r", "dim"), ("lora_r", "dim"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout"))),  # noqa: E501
        ("grpo: {}\ndata: {train: [{path: x}, {path: y, repeat: 2}]}", "data.train.1.repeat", "repeated records, not"),
        ("grpo: {}\ndata: {default: {env_name: code}}", "data.default.env_name", "execution of code, not"),
        ("grpo: {}\ndata: {train: {prompt_file: a}, validation: {prompt_file: b}}", "data.validation.prompt_file", "Give both the same"),  # noqa: E501
        ("sft: {}\ndata: {default: {processor: mine}}", "data.default.processor", "Set it to sft_processor or default"),
        ("sft: {}\ndata: {add_generation_prompt: false}", "data.add_generation_prompt", "Set it to true"),
        ("grpo: {}\npolicy: {megatron_cfg: {moe_enable_deepep: true}}", f"{M}.moe_enable_deepep", "Set that to flex, or this to false"),  # noqa: E501
        (f"grpo: {{}}\npolicy: {{megatron_cfg: {{{FLEX}, moe_enable_deepep: true, moe_flex_dispatcher_backend: hybridep}}}}", f"{M}.moe_enable_deepep", "Set that to null, or"),  # noqa: E501
        ("distillation: {}\npolicy: {megatron_cfg: {fp8_cfg: {enabled: true}}}\nteacher: {megatron_cfg: {fp8_cfg: {enabled: true, fp8: hybrid}}}", "teacher.megatron_cfg.fp8_cfg.fp8", 'Set it to "e4m3"'),  # noqa: E501
        ("distillation: {}\nteacher: {megatron_cfg: {fp8_cfg: {enabled: true}}}", "teacher.megatron_cfg.fp8_cfg.enabled", "FP8 unlike the student's, not supported"),  # noqa: E501
        ("distillation: {}\nteacher: {dtensor_cfg: {enabled: true, context_parallel_size: {strange: 1}}}", "teacher.dtensor_cfg.context_parallel_size", "is not allowed. Allowed: a whole number"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_refused(text: str, path: str, said: str, read: Callable[..., LoadedConfig]) -> None:
    assert said in read(text).refused[path]


def test_a_teacher_in_eight_bits_as_the_student_is_nothing_to_say_of(read: Callable[..., LoadedConfig]) -> None:
    section = "{megatron_cfg: {fp8_cfg: {enabled: true, fp8: hybrid}}}"
    refused = read(f"distillation: {{}}\npolicy: {section}\nteacher: {section}").refused
    assert not [path for path in refused if "fp8" in path]


def test_layers_of_a_teacher_that_stay_in_bfloat16_are_those_of_the_student(read: Callable[..., LoadedConfig]) -> None:
    def refused(student: str, teacher: str) -> list[str]:
        on = "fp8_cfg: {enabled: true}"
        text = f"policy: {{megatron_cfg: {{{on}{student}}}}}\nteacher: {{megatron_cfg: {{{on}{teacher}}}}}"
        return [path for path in read(f"distillation: {{}}\n{text}").refused if "bf16" in path or "fp8" in path]

    wide, two = ", first_last_layers_bf16: true", ", num_layers_at_start_in_bf16: 2"
    assert refused(wide + two, wide + two) == refused(two, "") == refused("", two) == refused("", "") == []
    assert refused("", wide) == refused(wide, "") == ["teacher.megatron_cfg.first_last_layers_bf16"]
    assert refused(wide, wide + two) == ["teacher.megatron_cfg.num_layers_at_start_in_bf16"]


def test_a_key_of_eight_bits_without_effect_is_none_of_a_teacher_either(read: Callable[..., LoadedConfig]) -> None:
    section, more = "{megatron_cfg: {fp8_cfg: {enabled: true%s}}}", ", force_clear_fp8_caches: true"
    refused = read(f"distillation: {{}}\npolicy: {section % ''}\nteacher: {section % more}").refused
    assert not [path for path in refused if "fp8" in path]


@pytest.mark.parametrize("key", ["use_on_policy_kl_approximation", "use_kl_in_reward"])
def test_the_gradient_of_the_divergence_is_told_of_where_it_is_another(
    key: str, read: Callable[..., LoadedConfig]
) -> None:
    recipe = "grpo: {}\nloss_fn: {reference_policy_kl_penalty: 0.1}\nlogger: {log_dir: logs}"
    (told,) = [note for note in read(recipe).notes if "kl_penalty" in note]
    assert "loss_fn.use_on_policy_kl_approximation=true does here" in told
    assert not [note for note in read(recipe, f"loss_fn.{key}=true").notes if "kl_penalty" in note]


@pytest.mark.parametrize("name", ["OpenMathInstruct-2", "ResponseDataset", "my.own.Class"])
def test_a_path_that_is_given_counts_beside_the_name_of_a_data_set(
    name: str, read: Callable[..., LoadedConfig]
) -> None:
    loaded = read(f"sft: {{}}\ndata: {{train: {{dataset_name: {name}}}}}", "data.train.path=mine.jsonl")
    train = value(loaded, "data.train")
    assert (train["path"], train["split"], train["split_validation_size"]) == ("mine.jsonl", None, 0.0)
    assert (train["input_key"], train["output_key"]) == (None, None)
    assert not loaded.refused


def test_of_a_path_and_a_name_the_nearer_counts(read: Callable[..., LoadedConfig], tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("algorithm: sft\nsft: {}\ndata: {train: {path: mine.jsonl}}")
    (tmp_path / "hub.yaml").write_text("algorithm: sft\nsft: {}\ndata: {train: {dataset_name: gsm8k}}")
    by_name, by_path = "hf://datasets/openai/gsm8k/main", "mine.jsonl"
    for text, overrides, wanted in (
        ("defaults: base.yaml\ndata: {train: {dataset_name: gsm8k}}", (), by_name),
        ("defaults: base.yaml\n", ("+data.train.dataset_name=gsm8k",), by_name),
        ("defaults: base.yaml\n", ("+data.train.data_path=b.jsonl",), "b.jsonl"),
        ("defaults: hub.yaml\ndata: {train: {path: mine.jsonl}}", (), by_path),
        ("defaults: hub.yaml", ("data.train.path=mine.jsonl",), by_path),
    ):
        loaded = read(text, *overrides)
        assert (value(loaded, "data.train.path"), loaded.refused) == (wanted, {}), text
    twice = read("sft: {}\ndata: {train: {path: mine.jsonl, dataset_name: gsm8k}}")
    assert "Leave one of them out" in twice.refused["data.train.path"]


FILE_WITH_DEFAULTS = """
grpo: {}
data:
  train: {dataset_name: ResponseDataset, data_path: x.jsonl}
  validation: null
  default: {prompt_file: a.txt, system_prompt_file: b.txt, env_name: math, output_key: o, seed: 5}
"""


@pytest.mark.parametrize(
    ("override", "path", "wanted"),
    [
        ("data.prompt_file=null", "data.prompt_file", None),
        ("data.prompt_file=c.txt", "data.prompt_file", "c.txt"),
        ("data.system_prompt_file=null", "data.system_prompt_file", None),
        ("data.env_name=function", "data.env_name", "function"),
        ("data.train.output_key=null", "data.train.output_key", None),
        ("data.train.seed=1000000", "data.train.seed", 1_000_000),
        ("+data.train.prompt_file=null", "data.prompt_file", None),
        ("data.default.prompt_file=null", "data.prompt_file", None),
        ("~data.default.prompt_file", "data.prompt_file", None),
    ],
)
def test_the_command_line_counts_before_the_defaults_of_a_file(
    override: str, path: str, wanted: object, read: Callable[..., LoadedConfig]
) -> None:
    loaded = read(FILE_WITH_DEFAULTS, override)
    assert (value(loaded, path), loaded.refused) == (wanted, {})


def test_the_command_line_counts_before_what_each_data_set_of_a_file_says(read: Callable[..., LoadedConfig]) -> None:
    text = "grpo: {}\ndata: {train: {path: x, prompt_file: a}, validation: {path: y, prompt_file: b}}"
    loaded = read(text, "data.prompt_file=c")
    assert (value(loaded, "data.prompt_file"), loaded.refused) == ("c", {})


def test_a_prompt_file_that_one_file_names_twice_is_refused(read: Callable[..., LoadedConfig]) -> None:
    loaded = read("grpo: {}\ndata: {prompt_file: a, train: {path: x}, default: {prompt_file: b}}")
    assert loaded.refused["data.prompt_file"] == 'is "a", and data.default.prompt_file "b". Leave one out.'


def test_the_default_of_a_further_data_set_counts_beside_an_override_of_the_first(
    read: Callable[..., LoadedConfig],
) -> None:
    text = "grpo: {}\ndata: {train: {path: x, further: [{path: y}]}, default: {output_key: o}}"
    train = value(read(text, "data.train.output_key=null"), "data.train")
    assert (train["output_key"], train["further"][0]["output_key"]) == (None, "o")


def test_a_list_of_data_sets(read: Callable[..., LoadedConfig]) -> None:
    loaded = read(
        """
grpo: {}
data:
  train:
    - {dataset_name: OpenMathInstruct-2, split_validation_size: 0.1, seed: 3}
    - {dataset_name: DeepScaler, max_samples: 7}
    - {data_path: mine.jsonl, input_key: q, output_key: a}
  validation:
    - {dataset_name: AIME2024, repeat: 16}
    - {dataset_name: DAPOMathAIME2024}
  default: {env_name: math, prompt_file: cot.txt, seed: 5}
"""
    )
    assert loaded.refused == {}
    train, validation = loaded.values["data"]["train"], loaded.values["data"]["validation"]
    assert [train["path"], train["split_validation_size"], train["seed"]] == [
        "hf://datasets/nvidia/OpenMathInstruct-2", 0.1, 3,
    ]  # fmt: skip
    assert [each["path"] for each in train["further"]] == [
        "hf://datasets/agentica-org/DeepScaleR-Preview-Dataset", "mine.jsonl",
    ]  # fmt: skip
    assert [each["max_samples"] for each in train["further"]] == [7, None]
    assert [each["seed"] for each in train["further"]] == [5, 5]
    assert train["further"][1]["input_key"] == "q"
    assert [validation["repeat"], [each["repeat"] for each in validation["further"]]] == [16, [1]]
    assert loaded.values["data"]["prompt_file"] == "cot.txt"


@pytest.mark.parametrize(
    "data",
    [
        "{train: {path: x, further: [{path: y}, {data_path: z, input_key: q}]}}",
        "{train: [{path: x}, {path: y}, {data_path: z, input_key: q}], default: {seed: 5}}",
    ],
)
def test_a_further_data_set_has_defaults_and_nothing_of_the_first(data: str, read: Callable[..., LoadedConfig]) -> None:
    first = data.replace("path: x", "path: x, max_samples: 3, output_key: o", 1)
    loaded = read(f"grpo: {{}}\ndata: {first}")
    assert loaded.refused == {}
    train = loaded.values["data"]["train"]
    own = defaults_of(FurtherTrainingDataConfig) | {"seed": 5 if "default" in data else 1_000_000}
    assert (train["max_samples"], train["output_key"]) == (3, "o")
    assert train["further"] == [
        {**own, "path": "y"},
        {**own, "path": "z", "input_key": "q"},
    ]
    assert read(yaml.safe_dump(loaded.values)).values["data"]["train"] == train, "as a run has saved it"


@pytest.mark.parametrize("further", ["3", "[3]", "{path: y}", "null"])
def test_further_data_sets_that_are_none(further: str, read: Callable[..., LoadedConfig]) -> None:
    found = examine(read(f"grpo: {{}}\ndata: {{train: {{path: x, further: {further}}}}}"), run_here=False)
    said = [str(each) for each in found.problems if each.path.startswith("data.train.further")]
    assert len(said) == 1
    assert re.search("is not allowed. Allowed: a (list of sections|section of keys)", said[0])


def test_keys_without_effect_are_one_line_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], configs: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"defaults: {configs / 'grpo_tiny.yaml'}\nlogger: {{log_dir: logs, monitor_gpus: true}}\n")
    assert cli.main(["check", str(path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
    assert re.fullmatch(r"warning: \d keys have no effect here, in a recipe of NeMo-RL; `check --verbose` .*", line)
    assert cli.main(["check", "--verbose", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"without effect: logger.log_dir: metrics are in the run directory, beside the checkpoints ({path}:2)" in out
    assert "keys have no effect" not in out
    assert cli.main(["check", str(configs / "grpo_tiny.yaml")]) == 0
    assert "NeMo-RL" not in capsys.readouterr().out


EACH = "linear_q linear_k linear_v linear_proj linear_fc1_gate linear_fc1_up linear_fc2"
NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16"


def by_lora(lora: str, model: str = "Qwen/Qwen3-8B-Base", others: str = "cpu_offload: false") -> str:
    return f"""
grpo: {{max_num_steps: 2}}
policy:
  model_name: {model}
  tokenizer: {{name: "${{policy.model_name}}"}}
  dtensor_cfg: {{enabled: true, tensor_parallel_size: 1, lora_cfg: {{{lora}}}, {others}}}
"""


@pytest.mark.parametrize(
    ("lora", "targets"),
    [
        ("match_all_linear: false", EACH),
        ("target_modules: ['*_proj']", EACH),
        ("target_modules: ['*q_proj', '.*v_proj']", "linear_q linear_v"),
        ("target_modules: ['*.mlp.*']", "linear_fc1_gate linear_fc1_up linear_fc2"),
        ("exclude_modules: [lm_head, '*o_proj', '*.mlp.*']", "linear_q linear_k linear_v"),
        ("match_all_linear: true", f"{EACH} output_layer"),
        ("target_modules: ['*q_proj', lm_head]", "linear_q output_layer"),
        ("exclude_modules: ['*out_proj*']", f"{EACH} output_layer"),
    ],
)
def test_lora_by_dtensor_has_an_adapter_for_each_projection(
    read: Callable[..., LoadedConfig], lora: str, targets: str
) -> None:
    loaded = read(by_lora(f"enabled: true, dim: 128, alpha: 64, lora_A_init: uniform, use_triton: false, {lora}"))
    assert not loaded.refused
    section = value(loaded, f"{M}.peft")
    assert section["target_modules"] == targets.split()
    wanted = {"enabled": True, "dim": 128, "alpha": 64, "lora_A_init_method": "kaiming", "lora_B_init_method": "zero"}
    assert {key: section[key] for key in wanted} == wanted
    off = read(by_lora(f"enabled: false, {lora}"))
    assert value(off, f"{M}.peft.enabled") is False
    assert value(read(by_lora(f"enabled: true, {lora}"), f"{M}.peft.dim=2"), f"{M}.peft.dim") == 2


@pytest.mark.parametrize(
    ("lora", "model", "key", "words"),
    [
        ("target_modules: ['*layers.1.*']", "Qwen/Qwen3-8B-Base", "target_modules", "LoRA of some layers by DTensor"),
        ("target_modules: [query]", "Qwen/Qwen3-8B-Base", "target_modules", "leaves no linear"),
        ("exclude_modules: ['*layers.2.*']", "Qwen/Qwen3-8B-Base", "exclude_modules", "LoRA of some layers by DTensor"),
        ("exclude_modules: [o_proj]", "Qwen/Qwen3-8B-Base", "exclude_modules", "Write '*o_proj' for all of that name"),
        ("target_modules: ['*(q_proj']", "Qwen/Qwen3-8B-Base", "target_modules", "is no pattern"),
        ("target_modules: [q_proj], match_all_linear: true", "Qwen/Qwen3-8B-Base", "match_all_linear", "Give one"),
        ("lora_A_init: gaussian", "Qwen/Qwen3-8B-Base", "lora_A_init", "xavier or uniform"),
        ("target_modules: ['*experts*']", "Qwen/Qwen3-30B-A3B", "target_modules", "LoRA of a model with experts"),
        ("match_all_linear: true", "deepseek-ai/DeepSeek-V3", "enabled", "of a deepseek_v3 there were not compared"),
        ("exclude_modules: ['*out_proj*']", NANO, "enabled", "Say policy.dtensor_cfg.automodel_kwargs.force_hf=true"),
    ],
)  # fmt: skip
def test_lora_by_dtensor_that_cannot_be_honoured_is_refused(
    read: Callable[..., LoadedConfig], lora: str, model: str, key: str, words: str
) -> None:
    assert words in read(by_lora(f"enabled: true, {lora}", model)).refused[f"policy.dtensor_cfg.lora_cfg.{key}"]


OF_ATTENTION = "linear_q linear_k linear_v linear_proj"
SHARED, OWN = ("*.shared_experts.linear_fc1 *.shared_experts.linear_fc2", "*.experts.linear_fc1 *.experts.linear_fc2")


@pytest.mark.parametrize(
    ("lora", "model", "targets"),
    [
        ("match_all_linear: true", "Qwen/Qwen3-30B-A3B", f"{OF_ATTENTION} output_layer"),
        ("match_all_linear: false", "Qwen/Qwen3-30B-A3B", OF_ATTENTION),
        ("exclude_modules: ['*out_proj*']", NANO, f"in_proj {SHARED} {OWN} {OF_ATTENTION} output_layer"),
        ("exclude_modules: ['*out_proj*', '*mixer.experts*', lm_head]", NANO, f"in_proj {SHARED} {OF_ATTENTION}"),
        (
            "exclude_modules: ['*out_proj*', '*.experts.*', lm_head]",
            NANO,
            f"in_proj {OF_ATTENTION}",
        ),  # a dot is any letter
        ("target_modules: ['*mixer.experts.*.up_proj', '*q_proj']", NANO, "*.experts.linear_fc1 linear_q"),
    ],
)
def test_lora_by_dtensor_of_experts_has_the_adapters_of_their_linears(
    read: Callable[..., LoadedConfig], lora: str, model: str, targets: str
) -> None:
    """Of a hybrid model each expert has its own; where experts are no linears, they have none."""
    loaded = read(by_lora(f"enabled: true, dim: 128, {lora}", model, "automodel_kwargs: {force_hf: true}"))
    assert not loaded.refused
    section = value(loaded, f"{M}.peft")
    assert section["target_modules"] == targets.split()
    assert section["share_expert_adapters"] == ("*.experts." not in targets)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("match_all_linear: true", "LoRA of out_proj by DTensor, not supported here"),
        ("target_modules: ['*.experts.3.*']", "LoRA of some layers by DTensor"),
    ],
)
def test_lora_by_dtensor_of_a_hybrid_model_that_cannot_be_honoured_is_refused(
    read: Callable[..., LoadedConfig], lora: str, words: str
) -> None:
    loaded = read(by_lora(f"enabled: true, {lora}", NANO, "automodel_kwargs: {force_hf: true}"))
    assert any(words in message for message in loaded.refused.values())
