"""Rules about offloading, recomputation beside it, and the paged stash: what breaks each, and the nearest legal one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.offload_modules import SUPPORTED_MODULES

Check = Callable[..., CheckedConfig]
Refusals = Callable[[str], list[str]]
Refuses = Callable[[str, str, str, str], None]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"

OFF = "M.fine_grained_activation_offloading=false"
TE = "M.transformer_impl=transformer_engine"
MEGATRON = f"M.activation_offload.engine=megatron {TE}"
AUTO = "M.offload_modules=auto M.activation_offload.gpu_memory_budget=72GiB"
FUSER = "M.use_transformer_engine_op_fuser=true"
SPLIT = "policy.precision=bfloat16 M.expert_model_parallel_size=2"
HYBRID = f"M.moe_token_dispatcher_type=flex M.moe_flex_dispatcher_backend=hybridep {SPLIT}"
STASH = f"MOE {MEGATRON} M.offload_modules=[core_attn] M.moe_paged_stash=true {HYBRID} {FUSER}"
CAPACITY = "M.moe_expert_rank_capacity_factor=1.5"

# overrides that break a rule; key of the line; words in it; what the nearest legal configuration adds
CASES = [
    ("M.offload_modules=[]", "offload_modules", "[core_attn, mlp_norm]", "M.offload_modules=[core_attn]"),
    ("M.offload_modules=null", "offload_modules", "or turn offloading off", OFF),
    ("M.offload_modules=null", "offload_modules", "set auto", AUTO),
    (
        "M.offload_modules=core_attn",
        "offload_modules",
        "Allowed: a list of text, or 'auto', or null. Write it as a list: [core_attn]",
        "M.offload_modules=[core_attn]",
    ),
    ("M.offload_modules=atuo", "offload_modules", "Did you mean 'auto'?", AUTO),
    ("M.offload_modules=[core_atn]", "offload_modules", "Did you mean 'core_attn'?", "M.offload_modules=[core_attn]"),
    (
        f"M.offload_modules=[fused_group_mlp,core_attn] MOE {FUSER} {TE}",
        "offload_modules",
        "'fused_group_mlp': only engine: megatron can offload it",
        MEGATRON,
    ),
    (
        f"M.offload_modules=[mlp_fc1] {MEGATRON}",
        "offload_modules",
        "'mlp_fc1': only engine: native can offload it. Allowed: attn_norm, ",
        "M.activation_offload.engine=native M.transformer_impl=torch",
    ),
    (
        "M.offload_modules=[attn_proj]",
        "offload_modules",
        "'attn_proj' needs 'core_attn'",
        "M.offload_modules=[attn_proj,core_attn]",
    ),
    (
        "M.offload_modules=[core_attn,core_attn]",
        "offload_modules",
        "'core_attn' is listed more than once",
        "M.offload_modules=[core_attn]",
    ),
    (
        "M.offload_modules=auto",
        "activation_offload.gpu_memory_budget",
        "'auto' needs it. Set a size, like \"72GiB\"",
        "M.activation_offload.gpu_memory_budget=72GiB",
    ),
    (f"{AUTO} {MEGATRON}", "offload_modules", "'auto' needs engine: native", "M.activation_offload.engine=native"),
    (
        f"{AUTO} M.activation_offload_fraction=0.5",
        "activation_offload_fraction",
        "excluded by offload_modules: auto",
        "M.activation_offload_fraction=1",
    ),
    (
        f"{AUTO} M.delta_offload_bytes_across_pp_ranks=1",
        "delta_offload_bytes_across_pp_ranks",
        "excluded by offload_modules: auto",
        "M.offload_modules=[core_attn]",
    ),
    ("M.offload_modules=[moe_act]", "offload_modules", "'moe_act' needs layers with experts", "MOE"),
    ("M.offload_modules=[mlp_act] MOE", "offload_modules", "'mlp_act' needs layers without experts", "DENSE"),
    (
        f"MOE {MEGATRON} M.offload_modules=[fused_group_mlp]",
        "offload_modules",
        "needs Transformer Engine's op fuser. Set use_transformer_engine_op_fuser to true",
        FUSER,
    ),
    (
        f"MOE {MEGATRON} {FUSER} M.offload_modules=[fused_group_mlp,expert_fc1,moe_act]",
        "offload_modules",
        "covers expert_fc1 and moe_act already",
        "M.offload_modules=[expert_fc1,moe_act]",
    ),
    (
        f"{TE} M.offload_modules=[attn_norm]",
        "offload_modules",
        "'attn_norm' has no boundary of its own in Transformer Engine's fused norm",
        "M.transformer_impl=torch",
    ),
    (
        f"{TE} M.offload_modules=[attn_norm]",
        "offload_modules",
        "'attn_norm' has no boundary of its own",
        "M.recompute_granularity=full M.recompute_method=uniform M.recompute_num_layers=1",
    ),
    (f"{TE} M.offload_modules=[mlp_norm]", "offload_modules", "'mlp_norm' has no boundary of its own", "MOE"),
    (
        f"{TE} MOE M.offload_modules=[expert_fc2]",
        "offload_modules",
        "'expert_fc2' can be offloaded with transformer_impl: torch alone",
        "M.transformer_impl=torch",
    ),
    (
        "MOE M.offload_modules=[shared_experts] M.moe_shared_expert_overlap=true",
        "offload_modules",
        "'shared_experts' cannot be offloaded with moe_shared_expert_overlap",
        "M.moe_shared_expert_overlap=false",
    ),
    (
        "MOE M.offload_modules=[expert_fc1] M.recompute_granularity=selective M.recompute_modules=[moe]",
        "offload_modules",
        "'expert_fc1' saves nothing while recompute_modules has 'moe'",
        "M.recompute_modules=[core_attn]",
    ),
    (
        f"M.cpu_offloading=true M.cpu_offloading_num_layers=1 {TE} M.offload_modules=[core_attn]",
        "cpu_offloading",
        "cannot be combined with fine_grained_activation_offloading",
        OFF,
    ),
    (
        f"M.cpu_offloading=true {TE} {OFF} M.recompute_granularity=selective",
        "cpu_offloading",
        "cannot be combined with recompute_granularity. Set cpu_offloading to false, or recompute_granularity to null",
        "M.recompute_granularity=null",
    ),
    (
        f"M.cpu_offloading=true {TE} {OFF} M.pipeline_model_parallel_size=2",
        "cpu_offloading",
        "cannot be combined with pipeline parallelism",
        "M.cpu_offloading=false",
    ),
    (
        f"M.cpu_offloading=true {TE} {OFF} M.cpu_offloading_num_layers=4",
        "cpu_offloading_num_layers",
        "must be below the model's 4 layers",
        "M.cpu_offloading_num_layers=3",
    ),
    (
        f"{MEGATRON} M.offload_modules=[core_attn] M.transformer_impl=torch",
        "activation_offload.engine",
        "megatron needs Transformer Engine, which transformer_impl: torch leaves out",
        "M.transformer_impl=auto",
    ),
    (
        "M.activation_offload.host_memory_budget=32GB",
        "activation_offload.host_memory_budget",
        "Write a number and one of KiB, MiB, GiB, TiB, like 32GiB. Or give a share",
        "M.activation_offload.host_memory_budget=32GiB",
    ),
    (
        f"{AUTO} M.activation_offload.gpu_memory_budget=72",
        "activation_offload.gpu_memory_budget",
        '72 is not allowed. Allowed: text like "72GiB", or null',
        "M.activation_offload.gpu_memory_budget=72MiB",
    ),
    (
        "M.offload_modules=[auto,core_attn]",
        "offload_modules",
        "'auto' chooses among all modules, and stands alone",
        "M.offload_modules=[core_attn]",
    ),
    (
        "M.activation_offload_fraction=1.5",
        "activation_offload_fraction",
        "Allowed: a number from 0 up to 1",
        "M.activation_offload_fraction=0.5",
    ),
    (
        "M.delta_offload_bytes_across_pp_ranks=-1",
        "delta_offload_bytes_across_pp_ranks",
        "Allowed: a whole number from 0",
        "M.delta_offload_bytes_across_pp_ranks=1",
    ),
]


@pytest.mark.parametrize(("broken", "key", "words", "legal"), CASES)
def test_rules(refuses: Refuses, broken: str, key: str, words: str, legal: str) -> None:
    refuses(broken, f"{M}.{key}", words, legal)


def test_all_that_excludes_offloading_of_layers_is_named(refusals: Refusals) -> None:
    lines = refusals(f"{STASH} {CAPACITY} M.cpu_offloading=true M.recompute_granularity=selective")
    assert [line.split("with ")[1].split(".")[0] for line in lines] == [
        "fine_grained_activation_offloading",
        "moe_paged_stash",
        "recompute_granularity",
    ]


@pytest.mark.parametrize("value", ["false", "null"])
def test_modules_may_be_null_while_offloading_is_off(check: Check, value: str) -> None:
    checked = check(f"{M}.fine_grained_activation_offloading={value}", f"{M}.offload_modules=null")
    assert checked.warnings == []


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
    check: Check, make_model: MakeModel, shape: dict[str, object], legal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl_offload.config.rules.model.refusals", lambda *_: [])  # the shape alone is asked about
    model = f"policy.model_name={make_model(**shape)}"
    for module in ("moe_act", "mlp_fc1"):
        overrides = [model, f"{M}.offload_modules=[{module}]"]
        if legal in (module, "both"):
            check(*overrides)
        else:
            with pytest.raises(ConfigError, match=f"'{module}' needs layers with"):
                check(*overrides)
        check(*overrides, f"{M}.fine_grained_activation_offloading=false")


def test_shared_experts_must_occur_in_the_model(check: Check, make_model: MakeModel) -> None:
    overrides = [f"policy.model_name={make_model(num_experts=8)}", f"{M}.offload_modules=[shared_experts]"]
    with pytest.raises(ConfigError, match="'shared_experts' needs shared experts, and the model has none"):
        check(*overrides)


def test_every_supported_module_is_legal_on_some_model(check: Check, make_model: MakeModel) -> None:
    model = make_model(n_routed_experts=8, first_k_dense_replace=2, n_shared_experts=1)
    assert not check(f"policy.model_name={model}", f"{M}.offload_modules=[{','.join(SUPPORTED_MODULES)}]").warnings


@pytest.mark.parametrize(
    ("overrides", "key", "word"),
    [
        ("fine_grained_activation_offloading=false", "offload_modules", "ignored, because"),
        ("fine_grained_activation_offloading=null", "offload_modules", "ignored, because"),
        ("transformer_impl=auto", "offload_modules", "attn_norm and mlp_norm may not be offloadable"),
        ("delay_offload_until_cuda_graph=true", "delay_offload_until_cuda_graph", "ignored with cuda_graph_impl none"),
    ],
)
def test_warnings(check: Check, overrides: str, key: str, word: str) -> None:
    (warning,) = check(f"{M}.{overrides}").warnings
    assert warning.startswith(f"{M}.{key}: {word}")


WHOLE_LAYERS = (f"{M}.recompute_granularity=full", f"{M}.recompute_method=uniform", f"{M}.recompute_num_layers=1")
BLOCK = (f"{M}.recompute_granularity=full", f"{M}.recompute_method=block")
SELECTED = f"{M}.recompute_granularity=selective"


@pytest.mark.parametrize(
    ("recompute", "modules", "silent"),
    [
        (WHOLE_LAYERS, "attn_norm", []),
        (WHOLE_LAYERS, "attn_norm,core_attn,mlp_act", ["core_attn", "mlp_act"]),
        ((*BLOCK, f"{M}.recompute_num_layers=4"), "core_attn", ["core_attn"]),
        ((*BLOCK, f"{M}.recompute_num_layers=3"), "core_attn", []),
        ((SELECTED,), "attn_norm,core_attn", ["core_attn"]),
        ((SELECTED, f"{M}.recompute_modules=[mlp]"), "core_attn,mlp_norm,mlp_act", ["mlp_act"]),
        ((SELECTED, f"{M}.recompute_modules=[mlp_fc1]"), "core_attn,mlp_norm,mlp_fc1,mlp_act", ["mlp_fc1", "mlp_act"]),
        ((SELECTED, f"{M}.recompute_modules=[mlp_fc1]", f"{M}.recompute_num_layers=1"), "mlp_norm,mlp_act", []),
        ((SELECTED, f"{M}.recompute_modules=[mlp_act]"), "mlp_norm,mlp_act", []),
        ((SELECTED, f"{M}.recompute_modules=[layernorm]"), "attn_norm,qkv_linear,mlp_norm", []),
    ],
)
def test_modules_that_save_nothing_are_warned_about(
    check: Check, recompute: tuple[str, ...], modules: str, silent: list[str]
) -> None:
    warnings = check(*recompute, f"{M}.offload_modules=[{modules}]").warnings
    assert [warning.split("'")[1] for warning in warnings if "saves nothing" in warning] == silent
    assert all(warning.startswith(f"{M}.offload_modules: ") for warning in warnings)


def test_norms_of_experts_save_beside_recomputed_dense_mlps(check: Check, make_model: MakeModel) -> None:
    model = f"policy.model_name={make_model(num_experts=8, decoder_sparse_step=2)}"
    listed = f"{M}.offload_modules=[mlp_norm,mlp_fc1]"
    (warning,) = check(model, listed, SELECTED, f"{M}.recompute_modules=[mlp]").warnings
    assert "'mlp_fc1' saves nothing while recompute_modules has 'mlp'" in warning


@pytest.mark.parametrize(
    ("module", "recompute", "legal"),
    [("qkv_linear", "layernorm", "moe_act"), ("core_attn", "mla_up_proj", "layernorm")],
)
def test_what_recomputation_discards_is_not_offloaded(
    refusals: Callable[[str], list[str]], make_model: MakeModel, module: str, recompute: str, legal: str
) -> None:
    model = f"policy.model_name={make_model(n_routed_experts=8, kv_lora_rank=8)}"
    settings = f"{model} M.offload_modules=[{module}] M.recompute_granularity=selective"
    (line,) = refusals(f"{settings} M.recompute_modules=[{recompute}]")
    assert f"'{module}' saves what recompute_modules '{recompute}' discards" in line
    assert refusals(f"{settings} M.recompute_modules=[{legal}]") == []
    assert refusals(f"MOE M.offload_modules=[qkv_linear] {settings.split()[-1]} M.recompute_modules=[layernorm]") == []


def test_an_activation_within_what_is_recomputed_anyway_is_warned_about(check: Check) -> None:
    for whole in ("mlp", "mlp_fc1"):
        listed = f"{M}.recompute_modules=[mlp_act,{whole}]"
        (warning,) = check(SELECTED, listed).warnings
        assert f"'mlp_act' changes nothing: '{whole}' contains it" in warning
        assert check(SELECTED, listed, f"{M}.recompute_num_layers=2").warnings == []


OURS = f"MOE M.transformer_impl=torch M.offload_modules=[core_attn] M.moe_paged_stash=true {CAPACITY}"
SELECTIVE = "M.recompute_granularity=selective"
FULL = "M.recompute_granularity=full M.recompute_method=uniform M.recompute_num_layers=1 M.offload_modules=[attn_norm]"

STASH_CASES = [
    (STASH, "moe_expert_rank_capacity_factor", "moe_paged_stash needs it", CAPACITY),
    (
        f"{STASH} {CAPACITY} M.offload_modules=[expert_fc1]",
        "offload_modules",
        "'expert_fc1' is covered by moe_paged_stash already",
        "M.offload_modules=[core_attn]",
    ),
    (f"{STASH} {CAPACITY} DENSE M.expert_model_parallel_size=1", "moe_paged_stash", "needs layers with experts", "MOE"),
    (
        f"{STASH} {CAPACITY} M.moe_flex_dispatcher_backend=null",
        "moe_expert_rank_capacity_factor",
        "needs moe_flex_dispatcher_backend hybridep or ncclep",
        "M.moe_flex_dispatcher_backend=ncclep",
    ),
    (
        f"{STASH} {CAPACITY} M.use_transformer_engine_op_fuser=null",
        "moe_expert_rank_capacity_factor",
        "needs use_transformer_engine_op_fuser with hybridep",
        FUSER,
    ),
    (
        f"{OURS} M.moe_expert_rank_capacity_factor=null",
        "moe_expert_rank_capacity_factor",
        "moe_paged_stash needs it",
        CAPACITY,
    ),
    (
        f"{OURS} M.offload_modules=[core_attn,expert_fc2]",
        "offload_modules",
        "'expert_fc2' is covered by moe_paged_stash already",
        "M.offload_modules=[core_attn]",
    ),
    (
        f"{OURS} {SELECTIVE} M.recompute_modules=[moe]",
        "moe_paged_stash",
        "experts save nothing while recompute_modules has 'moe'",
        "M.recompute_modules=[moe_act]",
    ),
    (
        f"{OURS} {FULL}",
        "moe_paged_stash",
        "experts save nothing with recompute_granularity full",
        "M.moe_paged_stash=false",
    ),
    (
        f"{OURS} M.transformer_impl=auto",
        "moe_expert_rank_capacity_factor",
        "only layers in torch have such buffers",
        "M.transformer_impl=torch",
    ),
    (
        f"{OURS} M.expert_model_parallel_size=2 M.moe_token_dispatcher_type=alltoall",
        "moe_token_dispatcher_type",
        "by an all-gather. Set allgather",
        "M.moe_token_dispatcher_type=allgather",
    ),
    (
        f"{OURS} M.expert_tensor_parallel_size=2 M.moe_token_dispatcher_type=alltoall",
        "moe_token_dispatcher_type",
        "by an all-gather. Set allgather",
        "M.moe_token_dispatcher_type=allgather",
    ),
    (
        f"{OURS} policy.precision=bfloat16 M.moe_token_dispatcher_type=flex M.moe_flex_dispatcher_backend=hybridep",
        "moe_token_dispatcher_type",
        "by an all-gather. Set allgather",
        "M.moe_token_dispatcher_type=allgather M.moe_flex_dispatcher_backend=null",
    ),
    (
        f"{OURS} M.moe_shared_expert_overlap=true M.moe_token_dispatcher_type=alltoall",
        "moe_expert_rank_capacity_factor",
        "cannot be combined with moe_shared_expert_overlap",
        "M.moe_shared_expert_overlap=null",
    ),
]


@pytest.mark.parametrize(("broken", "key", "words", "legal"), STASH_CASES)
def test_stash_rules(refuses: Refuses, broken: str, key: str, words: str, legal: str) -> None:
    refuses(broken, f"{M}.{key}", words, legal)
