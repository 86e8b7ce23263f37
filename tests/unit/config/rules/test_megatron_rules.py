"""Megatron-Core's own rules: what breaks each, the essential words, the nearest legal configuration."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, read_config
from nemo_rl_offload.config.validation import CheckedConfig, examine
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
Refusals = Callable[[str], list[str]]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"

OFF = "M.fine_grained_activation_offloading=false"
TE = "M.transformer_impl=transformer_engine M.offload_modules=[core_attn]"
FULL = "M.recompute_granularity=full M.recompute_method=uniform M.recompute_num_layers=1"
SELECTIVE = "M.recompute_granularity=selective"
GATHER = "DDP.overlap_param_gather=true DDP.overlap_grad_reduce=true"
DISTRIBUTED = "M.optimizer.use_distributed_optimizer=true"
PRECISION = f"{TE} M.optimizer.use_precision_aware_optimizer=true"
VIRTUAL = "M.virtual_pipeline_model_parallel_size=2"
PIPELINE = "M.pipeline_model_parallel_size=2"
OVERLAP = "M.batch_p2p_comm=false M.overlap_p2p_comm=true"
WHY = "of a model with attention_bias true they do not do what config.json says"
SPLIT = "M.expert_model_parallel_size=2 policy.precision=bfloat16"

CASES = [
    ("M.enabled=false", "enabled", "Megatron-Core is the only", "M.enabled=true"),
    (f"{FULL} M.recompute_method=null", "recompute_method", "Set uniform or block", "M.recompute_method=block"),
    (f"{FULL} M.recompute_num_layers=null", "recompute_num_layers", "full recompute needs", "M.recompute_num_layers=2"),
    (
        f"M.activation_checkpointing=true {SELECTIVE} M.recompute_num_layers=1",
        "recompute_num_layers",
        "Set null",
        "M.activation_checkpointing=false",
    ),
    (f"{SELECTIVE} M.recompute_num_layers=1", "recompute_num_layers", "Set null", "M.recompute_num_layers=null"),
    (
        f"{SELECTIVE} M.recompute_modules=[mlp_act] M.recompute_num_layers=1",
        "recompute_num_layers",
        "but with mlp or mlp_fc1 in recompute_modules. Set null",
        "M.recompute_modules=[mlp_act,mlp_fc1]",
    ),
    (
        f"{SELECTIVE} MOE M.recompute_modules=[mlp_act]",
        "recompute_modules",
        "'mlp_act' needs layers without experts",
        "M.recompute_modules=[moe_act]",
    ),
    (
        f"{SELECTIVE} MOE M.recompute_modules=[mlp_act]",
        "recompute_modules",
        "Take moe_act, or remove it",
        "M.recompute_modules=[mlp_act,moe_act]",
    ),
    (
        f"{SELECTIVE} M.recompute_modules=[moe_act]",
        "recompute_modules",
        "Take mlp_act, or remove it",
        "M.recompute_modules=[mlp_act,moe_act]",
    ),
    (
        f"{SELECTIVE} M.recompute_modules=[mlp,mlp_fc1]",
        "recompute_modules",
        "'mlp' contains 'mlp_fc1'",
        "M.recompute_modules=[mlp_fc1]",
    ),
    (
        f"{SELECTIVE} {TE} M.activation_offload.engine=megatron M.offload_modules=[core_attn] "
        "M.recompute_modules=[mlp_fc1]",
        "recompute_modules",
        "'mlp_fc1' needs activation_offload.engine native",
        "M.recompute_modules=[mlp]",
    ),
    (
        f"{SELECTIVE} {TE} M.recompute_modules=[mlp_act] M.use_transformer_engine_op_fuser=true",
        "recompute_modules",
        "cannot be recomputed with use_transformer_engine_op_fuser",
        "M.use_transformer_engine_op_fuser=false",
    ),
    (
        f"{SELECTIVE} M.recompute_modules=[layer_norm]",
        "recompute_modules",
        "Did you mean 'layernorm'?",
        "M.recompute_modules=[layernorm]",
    ),
    (f"{SELECTIVE} M.recompute_modules=[moe]", "recompute_modules", "'moe' needs experts", "MOE"),
    (
        f"{SELECTIVE} M.recompute_modules=[moe_act]",
        "recompute_modules",
        "the model has none. Take mlp_act, or remove it.",
        "MOE",
    ),
    (
        f"{SELECTIVE} M.recompute_modules=[shared_experts]",
        "recompute_modules",
        "'shared_experts' needs shared experts",
        "MOE M.offload_modules=[core_attn]",
    ),
    (
        f"{SELECTIVE} MOE M.recompute_modules=[shared_experts] M.moe_shared_expert_overlap=true",
        "recompute_modules",
        "cannot be recomputed with moe_shared_expert_overlap",
        "M.moe_shared_expert_overlap=false",
    ),
    (
        f"{SELECTIVE} M.recompute_modules=[mla_up_proj]",
        "recompute_modules",
        "'mla_up_proj' needs latent attention",
        "M.recompute_modules=[mlp]",
    ),
    (
        f"{SELECTIVE} M.recompute_modules=[gdn_norm_out]",
        "recompute_modules",
        "'gdn_norm_out' needs linear attention",
        "M.recompute_modules=[]",
    ),
    (
        "MOE M.moe_shared_expert_overlap=true M.moe_token_dispatcher_type=allgather",
        "moe_shared_expert_overlap",
        "needs moe_token_dispatcher_type alltoall or flex",
        "M.moe_token_dispatcher_type=alltoall",
    ),
    (
        "MOE M.moe_flex_dispatcher_backend=ncclep",
        "moe_flex_dispatcher_backend",
        "needs moe_token_dispatcher_type flex",
        f"M.moe_token_dispatcher_type=flex {SPLIT}",
    ),
    *(
        (
            f"MOE M.moe_token_dispatcher_type=flex M.moe_flex_dispatcher_backend={backend} {SPLIT} {broken}",
            "moe_token_dispatcher_type",
            words,
            legal,
        )
        for backend in ("null", "deepep", "ncclep", "hybridep")
        for broken, words, legal in (
            ("M.expert_model_parallel_size=1", "needs ranks that share the experts", "M.expert_model_parallel_size=2"),
            (
                "M.expert_model_parallel_size=1 M.tensor_model_parallel_size=2 M.sequence_parallel=true",
                "needs ranks that share the experts",
                "M.expert_tensor_parallel_size=2",
            ),
            ("policy.precision=float32", "flex moves tokens in bfloat16 alone", "policy.precision=bfloat16"),
        )
        if backend != "hybridep" or "precision" in broken
    ),
    (
        "MOE M.moe_router_load_balancing_type=sinkhorn",
        "moe_aux_loss_coeff",
        "balances without a loss. Set it to 0",
        "M.moe_aux_loss_coeff=0",
    ),
    ("M.expert_model_parallel_size=2", "expert_model_parallel_size", "the model has no experts", "MOE"),
    (VIRTUAL, "virtual_pipeline_model_parallel_size", "needs pipeline", f"{PIPELINE} {OVERLAP}"),
    (
        "M.num_layers_in_first_pipeline_stage=1",
        "num_layers_in_first_pipeline_stage",
        "needs pipeline_model_parallel_size above 1",
        "M.num_layers_in_first_pipeline_stage=null",
    ),
    (
        f"{VIRTUAL} {PIPELINE}",
        "batch_p2p_comm",
        "and two pipeline ranks, batched messages give wrong gradients",
        OVERLAP,
    ),
    (f"{PIPELINE}1", "pipeline_model_parallel_size", "4 layers cannot be divided among 21 ranks", PIPELINE),
    (
        f"{PIPELINE} M.num_layers_in_first_pipeline_stage=3 M.num_layers_in_last_pipeline_stage=2",
        "pipeline_model_parallel_size",
        "4 layers cannot be divided among 2 ranks with num_layers_in_first_pipeline_stage=3 and "
        "num_layers_in_last_pipeline_stage=2. Set policy.megatron_cfg.num_layers_in_first_pipeline_stage=null",
        "M.num_layers_in_last_pipeline_stage=1",
    ),
    (
        f"{PIPELINE} {VIRTUAL} {OVERLAP} M.num_layers_in_first_pipeline_stage=1",
        "num_layers_in_first_pipeline_stage",
        "1 is not a multiple of",
        "M.virtual_pipeline_model_parallel_size=null",
    ),
    (
        "M.pipeline_model_parallel_layout=Ett|ttL",
        "pipeline_model_parallel_layout",
        "needs pipeline_model_parallel_size above 1",
        "M.pipeline_model_parallel_layout=null",
    ),
    (
        f"{PIPELINE} M.pipeline_model_parallel_layout=Ett|ttL M.num_layers_in_first_pipeline_stage=2",
        "num_layers_in_first_pipeline_stage",
        "excluded by pipeline_model_parallel_layout",
        "M.num_layers_in_first_pipeline_stage=null",
    ),
    (
        f"{PIPELINE} M.pipeline_model_parallel_layout=Ett|tttL",
        "pipeline_model_parallel_layout",
        "has 5 of t (layer), and the model has 4. Write 4.",
        "M.pipeline_model_parallel_layout=Et|tttL",
    ),
    (
        "M.tensor_model_parallel_size=3",
        "tensor_model_parallel_size",
        "does not divide the model's 4 attention heads",
        "M.tensor_model_parallel_size=4",
    ),
    ("M.overlap_p2p_comm=true", "batch_p2p_comm", "excluded by overlap_p2p_comm", "M.batch_p2p_comm=false"),
    (
        "MOE M.tensor_model_parallel_size=2",
        "sequence_parallel",
        "experts need it beside tensor parallelism",
        "M.sequence_parallel=true",
    ),
    ("M.sequence_parallel=true", "sequence_parallel", "needs tensor_model", "M.tensor_model_parallel_size=2"),
    ("M.optimizer.min_lr=0.1", "optimizer.min_lr", "above optimizer.lr", "M.optimizer.lr=0.1"),
    ("M.scheduler.lr_warmup_init=0.1", "scheduler.lr_warmup_init", "above optimizer.lr", "M.optimizer.lr=0.1"),
    (
        "M.scheduler.lr_decay_style=cosine M.scheduler.lr_decay_iters=5",
        "scheduler.lr_warmup_iters",
        "not below lr_decay_iters, 5",
        "M.scheduler.lr_decay_iters=6",
    ),
    (
        "M.optimizer.weight_decay=0.1 M.scheduler.end_weight_decay=0.0",
        "scheduler.end_weight_decay",
        "0.0 is below start_weight_decay 0.1",
        "M.scheduler.start_weight_decay=0",
    ),
    (
        "M.scheduler.end_weight_decay=0.1",
        "scheduler.weight_decay_incr_style",
        "from 0.0 to 0.1. Set linear or cosine",
        "M.scheduler.weight_decay_incr_style=linear",
    ),
    (
        GATHER,
        "distributed_data_parallel_config.overlap_param_gather",
        f"needs {M}.optimizer.use_distributed",
        DISTRIBUTED,
    ),
    (
        f"{GATHER} {DISTRIBUTED} DDP.overlap_grad_reduce=false",
        "distributed_data_parallel_config.overlap_param_gather",
        "overlap_grad_reduce. Set",
        "DDP.overlap_grad_reduce=true",
    ),
    (
        f"{DISTRIBUTED} M.optimizer.optimizer=sgd",
        "optimizer.use_distributed_optimizer",
        "splits adam alone",
        "M.optimizer.use_distributed_optimizer=false",
    ),
    (PRECISION, "optimizer.use_precision_aware_optimizer", "needs use_distributed_optimizer", DISTRIBUTED),
    (
        f"{PRECISION} {DISTRIBUTED} M.optimizer.optimizer=sgd",
        "optimizer.use_distributed_optimizer",
        "optimizer: adam",
        "M.optimizer.optimizer=adam",
    ),
    *(
        (setting, setting.split("=")[0].removeprefix("M."), "which transformer_impl: torch leaves out", TE)
        for setting in (
            "M.apply_rope_fusion=true",
            "M.moe_permute_fusion=true",
            "M.gradient_accumulation_fusion=true",
            "M.use_transformer_engine_op_fuser=true",
            "M.attention_backend=flash",
        )
    ),
]


@pytest.mark.parametrize(("broken", "key", "words", "legal"), CASES)
def test_rules(refusals: Refusals, broken: str, key: str, words: str, legal: str) -> None:
    broken, legal = (text.replace("DDP.", "M.distributed_data_parallel_config.") for text in (broken, legal))
    (line,) = refusals(broken)
    assert line.startswith(f"{M}.{key}: ")
    assert words in line
    assert refusals(f"{broken} {legal}") == []


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "silu"])
def test_fused_activation_must_be_the_models(refusals: Refusals, make_model: MakeModel, activation: str) -> None:
    lines = refusals(f"policy.model_name={make_model(hidden_act=activation)} M.bias_activation_fusion=true")
    assert [line.split(":")[0] for line in lines] == (
        [f"{M}.bias_activation_fusion"] if activation == "gelu_pytorch_tanh" else []
    )


@pytest.mark.parametrize(("num_ranks", "is_legal"), [(2, True), (3, False), (6, True)])
def test_tensor_ranks_and_key_heads_must_divide(
    refusals: Refusals, make_model: MakeModel, num_ranks: int, is_legal: bool
) -> None:
    model = make_model(num_attention_heads=6, num_key_value_heads=2)
    lines = refusals(f"policy.model_name={model} M.tensor_model_parallel_size={num_ranks}")
    assert lines == [] if is_legal else "3 and the model's 2 key heads do not divide" in lines[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_any_vocabulary_is_divided_among_tensor_parallel_ranks(
    num_ranks: int, make_model: MakeModel, refusals: Refusals
) -> None:
    model = make_model(num_hidden_layers=2, num_attention_heads=4, vocab_size=258)
    assert refusals(f"policy.model_name={model} M.tensor_model_parallel_size={num_ranks}") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("recompute_modules=[core_attn]", "recompute_modules"),
        ("recompute_num_layers=1", "recompute_num_layers"),
        ("moe_router_dtype=fp32", "moe_router_dtype"),
        ("freeze_moe_router=true", "freeze_moe_router"),
        ("moe_token_dispatcher_type=flex", "moe_token_dispatcher_type"),
        ("cuda_graph_modules=[attn]", "cuda_graph_modules"),
    ],
)
def test_ignored_settings_are_warned_about(check: Check, overrides: str, key: str) -> None:
    (warning,) = check(f"{M}.{overrides}").warnings
    assert warning.startswith(f"{M}.{key}: ignored")


@pytest.mark.parametrize(
    ("backend", "needed"), [("null", "deep_ep"), ("hybridep", "branch hybrid-ep"), ("ncclep", "NVTE_BUILD_WITH_NCCL")]
)
def test_a_run_needs_the_library_of_the_dispatcher_and_a_check_elsewhere_says_so(
    backend: str, needed: str, check: Check, moe_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl_offload.config.rules.machine.find_spec", lambda name: None)
    overrides = (
        f"policy.model_name={moe_model}",
        f"{M}.offload_modules=[core_attn]",
        f"{M}.moe_token_dispatcher_type=flex",
        f"{M}.moe_flex_dispatcher_backend={backend}",
        *SPLIT.replace("M.", f"{M}.").split(),
    )
    said = [line for line in check(*overrides, run_here=False).warnings if "dispatcher_type: flex with" in line]
    assert len(said) == 1
    assert needed in said[0]
    assert "Only a run needs it" in said[0]
    with pytest.raises(ConfigError, match="which is not installed here"):
        check(*overrides)


@pytest.mark.parametrize("key", ["recompute_modules=[mlp]", "recompute_method=block"])
def test_recompute_settings_of_the_other_granularity(check: Check, key: str) -> None:
    full = [f"{M}.recompute_granularity=full", f"{M}.recompute_method=uniform", f"{M}.recompute_num_layers=1"]
    overrides = full if key == "recompute_modules=[mlp]" else [f"{M}.recompute_granularity=selective"]
    off = f"{M}.fine_grained_activation_offloading=false", f"{M}.offload_modules=null"
    (warning,) = check(*overrides, *off, f"{M}.{key}").warnings
    assert warning.startswith(f"{M}.{key.split('=')[0]}: ignored")


@pytest.mark.parametrize("words", [{}, {"num_nextn_predict_layers": 1}])
def test_context_parallelism_takes_packs_and_models_that_predict_further_tokens(
    refusals: Refusals, make_model: MakeModel, words: dict[str, int]
) -> None:
    split = f"policy.model_name={make_model(**words)} M.context_parallel_size=2"
    assert refusals(split) == []
    assert refusals(f"{split} policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=4096") == []


def test_recompute_of_multi_token_prediction(check: Check, refusals: Refusals, make_model: MakeModel) -> None:
    model = f"policy.model_name={make_model(num_nextn_predict_layers=1)}"
    full = "M.recompute_granularity=full M.recompute_method"
    (line,) = refusals(f"{model} M.offload_modules=[attn_norm] {full}=uniform M.recompute_num_layers=2")
    assert line.startswith(f"{M}.recompute_num_layers: 2 is not allowed with recompute_method uniform")
    assert line.endswith("Set 1.")
    for legal in (
        f"{model} {full}=uniform M.recompute_num_layers=1",
        f"{model} {full}=block M.recompute_num_layers=2",
        f"{model} M.activation_checkpointing=true",
        f"DENSE {full}=uniform M.recompute_num_layers=2",
    ):
        assert refusals(f"{legal} M.offload_modules=[attn_norm]") == []
    block = [f"{M}.recompute_granularity=full", f"{M}.recompute_method=block", f"{M}.recompute_num_layers=4"]
    offloaded = f"{M}.offload_modules=[attn_norm]"
    assert check(*block, offloaded).warnings == []
    (warning,) = check(model, *block, offloaded).warnings
    assert warning.startswith(f"{M}.recompute_method: block leaves out the layers of multi-token prediction.")


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


def test_a_warmup_is_compared_with_updates(check: Check) -> None:
    """A step may have several updates, which the learning rate follows."""
    many = "grpo.max_num_steps=2 grpo.num_prompts_per_step=48 policy.megatron_cfg.scheduler.lr_decay_style=linear"
    assert check(*many.split()).warnings == []
    (line,) = check(*many.split(), "grpo.num_prompts_per_step=32").warnings
    assert "lr_warmup_iters: 5 is not below 4, the updates of the run" in line
    assert line.endswith("Lower it, such as policy.megatron_cfg.scheduler.lr_warmup_iters=0.")


TINY = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        ("env_vars={RANK:'1'}", "env_vars.RANK", "is set for each worker by this project"),
        ("env_vars={NCCL_DEBUG:1}", "env_vars.NCCL_DEBUG", "1 is not allowed. Allowed: text."),
        (
            "model_overrides={rotary_percnt:0.5}",
            "model_overrides.rotary_percnt",
            "TransformerConfig has no such field.",
        ),
        (
            "model_overrides={attention_softmax_in_fp3:true}",
            "model_overrides.attention_softmax_in_fp3",
            "Did you mean 'attention_softmax_in_fp32'?",
        ),
        (
            "model_overrides={cpu_offloading:true}",
            "model_overrides.cpu_offloading",
            f"has a key of its own. Set {M}.cpu_offloading",
        ),
        ("model_overrides={num_layers:2}", "model_overrides.num_layers", "set by the model's folder"),
        (
            "model_overrides={mtp_hybrid_override_pattern:EE}",
            "model_overrides.mtp_hybrid_override_pattern",
            "set by the model's folder",
        ),
        ("model_overrides={bf16:true}", "model_overrides.bf16", "set by policy.precision"),
        ("model_overrides={init_method:x}", "model_overrides.init_method", "cannot be written in YAML"),
        (
            "model_overrides={attention_softmax_in_fp32:1}",
            "model_overrides.attention_softmax_in_fp32",
            "1 is not allowed. Allowed: true or false.",
        ),
        ("cpu_affinity.map={a:1}", "cpu_affinity.map.a", "is no key here. Allowed: whole numbers."),
        ("cpu_affinity.map={0:-1}", "cpu_affinity.map.0", "-1 is not allowed. Allowed: a whole number from 0."),
    ],
)
def test_settings_by_name_that_are_refused(check: Check, overrides: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(f"{M}.{overrides}")
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"{M}.{path}: ")
    assert words in line


def test_settings_by_name_that_are_accepted(check: Check) -> None:
    checked = check(
        f"{M}.env_vars={{NCCL_DEBUG:INFO}}",
        f"{M}.model_overrides={{attention_softmax_in_fp32:true,init_method_std:0.01,moe_z_loss_coeff:null}}",
        f"{M}.cpu_affinity.map={{0:0,1:0}}",
    )
    section = checked.config["policy"]["megatron_cfg"]
    assert section["env_vars"] == {"NCCL_DEBUG": "INFO"}
    assert section["cpu_affinity"]["map"] == {0: 0, 1: 0}


def test_fields_that_megatron_checks_itself_are_warned_about(check: Check) -> None:
    assert check(f"{M}.model_overrides={{moe_z_loss_coeff:0.1}}").warnings == []
    (warning,) = check(f"{M}.model_overrides={{use_mup:true}}").warnings
    assert warning.startswith(f"{M}.model_overrides.use_mup: Megatron-Core's own rules for it")
    found = examine(read_config(TINY, [f"{M}.model_overrides={{num_layers:3}}"]), run_here=False)
    assert [problem.path for problem in found.problems] == [f"{M}.model_overrides.num_layers"]
    assert found.warnings == [], "it is refused, and nothing else is to be said about it"


def test_an_optimizer_of_which_nothing_goes_to_the_host(check: Check) -> None:
    path = f"{M}.optimizer.optimizer_cpu_offload"
    assert check(f"{path}=true").warnings == []
    (warning,) = check(f"{path}=true", f"{M}.optimizer.optimizer_offload_fraction=0").warnings
    assert warning.startswith(f"{path}: optimizer_offload_fraction is 0")


def test_layers_of_plain_torch_go_without_fusions_and_refuse_what_is_more(
    check: Check, refusals: Refusals, make_model: MakeModel
) -> None:
    """Whichever layers `auto` would choose for another model."""
    model = f"policy.model_name={make_model(model_type='qwen3', attention_bias=True)}"
    auto = f"{model} M.transformer_impl=auto"
    fused = f"{auto} M.apply_rope_fusion=true M.moe_permute_fusion=true"
    assert not [line for line in refusals(fused) if "Transformer Engine" in line]
    warnings = check(*fused.replace("M.", f"{M}.").split()).warnings
    assert not [line for line in warnings if "is not installed here" in line]
    assert [line for line in warnings if "apply_rope_fusion: has no effect, nor has moe_permute_fusion: " in line]
    for setting in ("M.fp8_cfg.enabled=true", "M.cuda_graph_impl=transformer_engine"):
        key = setting.split("=")[0].removeprefix("M.")
        assert [line for line in refusals(f"{auto} {setting}") if line.startswith(f"{M}.{key}: ") and WHY in line]
        assert not [line for line in refusals(f"M.transformer_impl=auto {setting}") if WHY in line]


def test_a_kernel_that_leaves_out_the_factor_of_rotations_has_no_effect(check: Check, make_model: MakeModel) -> None:
    fused = f"{M}.transformer_impl=auto", f"{M}.apply_rope_fusion=true"
    plain, yarn = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
    for positions, told in ((plain, False), (yarn | {"rope_theta": 10000.0}, True)):
        model = f"policy.model_name={make_model(rope_parameters=positions, max_position_embeddings=256)}"
        lines = [
            line
            for line in check(model, *fused, run_here=False).warnings
            if "multiply cosine and sine by 1.139" in line
        ]
        assert bool(lines) is told
        assert not [line for line in check(model).warnings if "apply_rope_fusion" in line]
