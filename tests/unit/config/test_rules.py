from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.checks import CheckedConfig
from nemo_rl_offload.config.rules import task_names
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.modules import SUPPORTED_MODULES

Check = Callable[..., CheckedConfig]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"
FULL = "M.recompute_granularity=full M.recompute_method=uniform M.recompute_num_layers=1"
SELECTIVE = "M.recompute_granularity=selective"
GATHER = "DDP.overlap_param_gather=true DDP.overlap_grad_reduce=true"
DISTRIBUTED = "M.optimizer.use_distributed_optimizer=true"
NO_OFFLOAD = "M.fine_grained_activation_offloading=false"

# overrides that break a rule; path of the line; words in it; what the nearest legal configuration adds
CASES = [
    ("M.enabled=false", "M.enabled", "Megatron-Core is the only", "M.enabled=true"),
    *(
        (f"M.{key}=2", f"M.{key}", "only data parallelism so far. Set it to 1.", f"M.{key}=1")
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    ),
    ("M.sequence_parallel=true", "M.sequence_parallel", "Set it to false.", "M.sequence_parallel=false"),
    ("M.offload_modules=[]", "M.offload_modules", "[core_attn, mlp_norm]", "M.offload_modules=[core_attn]"),
    ("M.offload_modules=null", "M.offload_modules", "or turn offloading off", NO_OFFLOAD),
    (
        "M.offload_modules=[core_atn]",
        "M.offload_modules",
        "'core_atn': unknown module. Did you mean 'core_attn'?",
        "M.offload_modules=[core_attn]",
    ),
    (
        f"M.offload_modules=[fused_group_mlp,core_attn] {NO_OFFLOAD}",
        "M.offload_modules",
        "'fused_group_mlp': not supported yet. Allowed: attn_norm, ",
        "M.offload_modules=[]",
    ),
    (
        "M.offload_modules=[attn_proj]",
        "M.offload_modules",
        "'attn_proj' needs 'core_attn'",
        "M.offload_modules=[attn_proj,core_attn]",
    ),
    (
        "M.offload_modules=[core_attn,core_attn]",
        "M.offload_modules",
        "'core_attn' is listed more than once",
        "M.offload_modules=[core_attn]",
    ),
    (
        "M.activation_offload.host_memory_budget=32GB",
        "M.activation_offload.host_memory_budget",
        "like 32GiB",
        "M.activation_offload.host_memory_budget=32GiB",
    ),
    (
        f"{FULL} M.recompute_method=null",
        "M.recompute_method",
        "Set uniform or block",
        "M.recompute_method=block",
    ),
    (
        f"{FULL} M.recompute_num_layers=null",
        "M.recompute_num_layers",
        "full recompute needs it",
        "M.recompute_num_layers=2",
    ),
    (
        f"{SELECTIVE} M.recompute_num_layers=1",
        "M.recompute_num_layers",
        "Set null",
        "M.recompute_num_layers=null",
    ),
    (
        f"{SELECTIVE} M.recompute_modules=[layer_norm]",
        "M.recompute_modules",
        "Did you mean 'layernorm'?",
        "M.recompute_modules=[layernorm]",
    ),
    (
        "policy.train_micro_batch_size=60",
        "policy.train_global_batch_size",
        "128 is not a multiple of train_micro_batch_size 60",
        "policy.train_micro_batch_size=32",
    ),
    (
        "policy.train_global_batch_size=256",
        "policy.train_global_batch_size",
        "Set 128 for one update per step",
        "grpo.num_prompts_per_step=32",
    ),
    (
        "grpo.num_generations_per_prompt=1 grpo.num_prompts_per_step=128",
        "grpo.num_generations_per_prompt",
        "at least 2",
        "grpo.use_leave_one_out_baseline=false",
    ),
    (
        "data.max_input_seq_length=89",
        "policy.max_total_sequence_length",
        "Set at least 97",
        "policy.max_total_sequence_length=97",
    ),
    ("M.optimizer.min_lr=0.1", "M.optimizer.min_lr", "above optimizer.lr", "M.optimizer.lr=0.1"),
    (
        "M.scheduler.lr_warmup_init=0.1",
        "M.scheduler.lr_warmup_init",
        "above optimizer.lr",
        "M.optimizer.lr=0.1",
    ),
    (
        "M.scheduler.lr_decay_style=cosine grpo.max_num_steps=5",
        "M.scheduler.lr_warmup_iters",
        "not below lr_decay_iters, 5",
        "M.scheduler.lr_decay_iters=6",
    ),
    (GATHER, "DDP.overlap_param_gather", "needs policy.megatron_cfg.optimizer.use_distributed", DISTRIBUTED),
    (
        f"{GATHER} {DISTRIBUTED} DDP.overlap_grad_reduce=false",
        "DDP.overlap_param_gather",
        "overlap_grad_reduce. Set",
        "DDP.overlap_grad_reduce=true",
    ),
    ("data.prompt_template=plain", "data.prompt_template", "Put {question}", "data.prompt_template=null"),
    (
        "env.reasoning_gym.task=spel_backward",
        "env.reasoning_gym.task",
        "Did you mean 'spell_backward'?",
        "env.reasoning_gym.task=chain_sum",
    ),
    (
        "env.reasoning_gym.task=zzzzzz",
        "env.reasoning_gym.task",
        "Some of them: ",
        "env.reasoning_gym.task=composite",
    ),
]


def expand(text: str) -> list[str]:
    return text.replace("DDP.", f"{M}.distributed_data_parallel_config.").replace("M.", f"{M}.").split()


@pytest.mark.parametrize(("broken", "path", "words", "legal"), CASES)
def test_rules(check: Check, broken: str, path: str, words: str, legal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*expand(broken))
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"{expand(path)[0]}: ")
    assert words in line
    check(*expand(broken), *expand(legal))


@pytest.mark.parametrize(
    ("path", "file"),
    [("policy.model_name", "config.json"), ("policy.tokenizer.name", "tokenizer_config.json")],
)
def test_folders_must_exist(check: Check, dense_model: Path, path: str, file: str) -> None:
    with pytest.raises(ConfigError, match=rf"\n{path}: 'no/such' is not a local .* with a {file} \(looked in /"):
        check("policy.model_name=no/such", f"policy.tokenizer.name={dense_model}", f"{path}=no/such")


@pytest.mark.parametrize(
    ("shape", "legal"),
    [
        ({}, "mlp_fc1"),
        ({"num_experts": 0}, "mlp_fc1"),
        ({"num_experts": None, "num_local_experts": 8}, "moe_act"),
        ({"n_routed_experts": 8}, "moe_act"),
        ({"n_routed_experts": 8, "first_k_dense_replace": 1}, "both"),
        ({"n_routed_experts": 8, "first_k_dense_replace": 4}, "mlp_fc1"),
        ({"n_routed_experts": 8, "moe_layer_freq": 2}, "both"),
        ({"num_experts": 8, "decoder_sparse_step": 2}, "both"),
        ({"num_experts": 8, "decoder_sparse_step": 5}, "mlp_fc1"),
        ({"num_experts": 8, "mlp_only_layers": [3]}, "both"),
        ({"num_experts": 8, "mlp_only_layers": [0, 1, 2, 3]}, "mlp_fc1"),
        ({"num_experts": 8, "mlp_only_layers": None, "decoder_sparse_step": 0}, "moe_act"),
        ({"num_experts": 8, "num_hidden_layers": "four"}, "moe_act"),
    ],
)
def test_modules_must_occur_in_the_model(
    check: Check, make_model: MakeModel, shape: dict[str, object], legal: str
) -> None:
    model = f"policy.model_name={make_model(**shape)}"
    for module in ("moe_act", "mlp_fc1"):
        overrides = [model, f"{M}.offload_modules=[{module}]"]
        if legal in (module, "both"):
            check(*overrides)
        else:
            with pytest.raises(ConfigError, match=f"'{module}' needs layers with"):
                check(*overrides)
        check(*overrides, f"{M}.fine_grained_activation_offloading=false")


def test_every_supported_module_is_legal_on_some_model(check: Check, make_model: MakeModel) -> None:
    model = make_model(num_experts=8, decoder_sparse_step=2)
    assert not check(f"policy.model_name={model}", f"{M}.offload_modules=[{','.join(SUPPORTED_MODULES)}]").warnings


def test_experts_are_offloaded_or_recomputed(check: Check, moe_model: Path) -> None:
    broken = [
        f"policy.model_name={moe_model}",
        f"{M}.offload_modules=[expert_fc1,moe_act,core_attn]",
        f"{M}.recompute_granularity=selective",
        f"{M}.recompute_modules=[moe]",
    ]
    with pytest.raises(ConfigError, match=r"2 problems\n.*'expert_fc1' saves nothing.*\n.*'moe_act' saves nothing"):
        check(*broken)
    check(*broken, f"{M}.recompute_modules=[core_attn]")
    check(*broken, f"{M}.offload_modules=[core_attn]")


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_broken_model_folder_is_one_problem(check: Check, make_model: MakeModel, content: str) -> None:
    model = make_model()
    (model / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"1 problem\npolicy\.model_name: .*config\.json"):
        check(f"policy.model_name={model}", f"{M}.offload_modules=[moe_act]")


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (NO_OFFLOAD, "M.offload_modules"),
        ("M.recompute_modules=[core_attn]", "M.recompute_modules"),
        ("M.recompute_num_layers=1", "M.recompute_num_layers"),
        (f"{FULL} M.recompute_modules=[mlp]", "M.recompute_modules"),
        (f"{SELECTIVE} M.recompute_method=block", "M.recompute_method"),
    ],
)
def test_ignored_settings_are_warned_about(check: Check, overrides: str, path: str) -> None:
    (warning,) = check(*expand(overrides)).warnings
    assert warning.startswith(f"{expand(path)[0]}: ignored")


@pytest.mark.parametrize("overrides", [FULL, "M.scheduler.lr_decay_style=linear", "grpo.max_num_steps=1"])
def test_legal_combinations_pass_without_warning(check: Check, overrides: str) -> None:
    assert check(*expand(overrides)).warnings == []


def test_task_names_are_those_that_reasoning_gym_registers() -> None:
    from reasoning_gym.factory import DATASETS

    assert task_names() == set(DATASETS)
