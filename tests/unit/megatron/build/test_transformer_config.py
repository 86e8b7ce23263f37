"""Every key reaches its Megatron field; Megatron's checks run on the view of it, and its refusals are ours."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build import transformer_config as setup
from nemo_rl_offload.megatron.build.config_check import provider_for
from nemo_rl_offload.megatron.layers.dense_mlp import open_dense_mlps
from nemo_rl_offload.specs.offload_modules import NATIVE_MODULES

MakePolicy = Callable[..., Any]


@dataclass
class Provider(TransformerConfig):
    """What Bridge hands over: a configuration whose checks run when it is finalized."""

    num_layers: int = 2
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_moe_experts: int | None = 4
    add_bias_linear: bool = False
    transformer_layer_spec: Any = None
    seq_length: int = 0
    seen: dict[str, Any] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None: ...

    def register_pre_wrap_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def finalize(self) -> None:
        keys = ("transformer_impl", "fine_grained_activation_offloading", "offload_modules")
        self.seen = {key: getattr(self, key) for key in keys}
        super().__post_init__()


KEYS = [
    ("min_offloaded_tensor_size=7", "min_offloaded_tensor_size", 7),
    ("moe_token_dispatcher_type=allgather", "moe_token_dispatcher_type", "allgather"),
    ("moe_aux_loss_coeff=0.25", "moe_aux_loss_coeff", 0.25),
    ("moe_aux_loss_coeff=null", "moe_aux_loss_coeff", 0.0),
    ("recompute_granularity=selective", "recompute_granularity", "selective"),
    ("recompute_modules=null", "recompute_modules", ["core_attn"]),
    ("tensor_model_parallel_size=2", "tensor_model_parallel_size", 2),
    ("pipeline_model_parallel_size=2", "pipeline_model_parallel_size", 2),
    ("context_parallel_size=2", "context_parallel_size", 2),
    ("expert_model_parallel_size=2", "expert_model_parallel_size", 2),
    ("expert_tensor_parallel_size=2", "expert_tensor_parallel_size", 2),
    ("offload_modules=[moe_act]", "offload_modules", ["moe_act"]),
    ("fine_grained_activation_offloading=false", "fine_grained_activation_offloading", False),
    ("fine_grained_activation_offloading=false", "offload_modules", []),
]


@pytest.mark.parametrize(("override", "name", "value"), KEYS)
def test_a_key_reaches_its_field(override: str, name: str, value: object, make_policy: MakePolicy) -> None:
    provider = Provider()
    setup.configure_provider(provider, make_policy(override))
    assert getattr(provider, name) == value


def test_megatron_is_told_of_eight_bits(make_policy: MakePolicy) -> None:
    """By the fields that its blocks read where they enter Transformer Engine's context."""
    provider, off = Provider(num_moe_experts=None), Provider()
    on = ("fp8_cfg.enabled=true", "fp8_cfg.fp8=hybrid", "fp8_cfg.fp8_recipe=tensorwise")
    some = ("first_last_layers_bf16=true", "num_layers_at_start_in_bf16=2", "num_layers_at_end_in_bf16=0")
    setup.apply_policy(provider, make_policy(*on, *some), "torch")
    assert (provider.fp8, provider.fp8_recipe, provider.fp8_param) == ("hybrid", "tensorwise", False)
    assert (provider.first_last_layers_bf16, provider.num_layers_at_start_in_bf16) == (True, 2)
    assert provider.num_layers_at_end_in_bf16 == 0
    setup.apply_policy(off, make_policy("fp8_cfg.fp8=hybrid"), "torch")
    assert off.fp8 is None


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "lacking"),
    [
        ("mxfp8", (9, 0), "13.0", "mxfp8 needs compute capability 10.0, and this worker has 9.0 with CUDA 13.0"),
        ("mxfp8", (10, 0), "13.0", None),
        ("blockwise", (8, 9), "13.0", "blockwise needs compute capability 9.0"),
        ("blockwise", (9, 0), "12.8", "blockwise needs torch for CUDA 12.9"),
        ("blockwise", (9, 0), "12.10", None),
        ("tensorwise", (8, 9), "12.1", None),
        ("tensorwise", (8, 0), "13.0", "tensorwise needs compute capability 8.9"),
    ],
)
def test_a_gpu_without_products_of_a_recipe_is_told_of(
    recipe: str, capability: tuple[int, int], cuda: str, lacking: str | None
) -> None:
    if lacking is None:
        setup.check_fp8_recipe(recipe, capability, cuda)
    else:
        with pytest.raises(ConfigError, match=rf"^policy.megatron_cfg.fp8_cfg.fp8_recipe: {lacking}"):
            setup.check_fp8_recipe(recipe, capability, cuda)


def test_keys_that_need_others(make_policy: MakePolicy) -> None:
    provider = Provider()
    full = ("recompute_granularity=full", "recompute_method=block", "recompute_num_layers=1")
    setup.configure_provider(provider, make_policy(*full))
    assert (provider.recompute_granularity, provider.recompute_method, provider.recompute_num_layers) == (
        "full",
        "block",
        1,
    )
    provider = Provider()
    policy = make_policy("recompute_granularity=selective", "recompute_modules=[moe_act]")
    setup.configure_provider(provider, policy | {"precision": "bfloat16", "max_total_sequence_length": 33})
    assert provider.recompute_modules == ["moe_act"]
    dense = Provider(num_moe_experts=None)
    setup.configure_provider(dense, policy)
    assert dense.recompute_modules == []
    assert provider.params_dtype == provider.pipeline_dtype == torch.bfloat16
    assert provider.bf16
    assert provider.seq_length == 33
    provider = Provider()
    setup.configure_provider(provider, make_policy("sequence_parallel=true", "tensor_model_parallel_size=2"))
    assert provider.sequence_parallel


@pytest.mark.parametrize(
    ("modules", "shown"), [(["mlp_act"], []), (["core_attn", "mlp_fc1"], ["core_attn"]), (["moe_act"], ["moe_act"])]
)
def test_checks_run_on_the_view_and_the_values_come_back(
    modules: list[str], shown: list[str], make_policy: MakePolicy
) -> None:
    provider = Provider()
    policy = make_policy("fine_grained_activation_offloading=true", f"offload_modules=[{','.join(modules)}]")
    assert setup.configure_provider(provider, policy) == "torch"
    assert provider.seen == {
        "transformer_impl": "local",
        "fine_grained_activation_offloading": bool(shown),
        "offload_modules": shown,
    }
    assert provider.fine_grained_activation_offloading
    assert provider.offload_modules == modules


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("offload_modules=[attn_proj]",), "attn_proj"),
        (("sequence_parallel=true",), "sequence parallelism"),
        (("recompute_granularity=full",), "recompute_method"),
        (("recompute_granularity=selective", "recompute_modules=[nothing]"), "nothing"),
    ],
)
def test_megatrons_refusal_is_a_config_error(overrides: tuple[str, ...], words: str, make_policy: MakePolicy) -> None:
    with pytest.raises(ConfigError, match=rf"(?is)^policy.megatron_cfg[.\w]*: Megatron-Core refuses .*{words}"):
        setup.configure_provider(Provider(), make_policy(*overrides))


@pytest.mark.parametrize(
    ("name", "has_gpu", "has_engine", "expected"),
    [
        ("auto", True, True, "transformer_engine"),
        ("auto", True, False, "torch"),
        ("auto", False, True, "torch"),
        ("torch", True, True, "torch"),
        ("transformer_engine", True, True, "transformer_engine"),
        ("transformer_engine", True, False, None),
        ("transformer_engine", False, True, None),
    ],
)
def test_transformer_impl(
    name: str, has_gpu: bool, has_engine: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(setup, "transformer_engine_problem", lambda: "" if has_engine else "OSError: no libcublas")
    if expected is None:
        reason = "OSError: no libcublas" if has_gpu else "there is no GPU"
        with pytest.raises(
            ConfigError, match=rf"^policy.megatron_cfg.transformer_impl: .* \({reason}\); use torch or auto"
        ):
            setup.resolve_transformer_impl(name)
    else:
        assert setup.resolve_transformer_impl(name) == expected


@pytest.mark.parametrize(
    "key",
    ["apply_rope_fusion=true", "attention_backend=flash", "activation_offload.engine=megatron", "fp8_cfg.enabled=true"],
)
def test_what_torch_layers_cannot_do_is_refused(make_policy: MakePolicy, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^policy.megatron_cfg.{key.split('=')[0]} needs Transformer Engine"):
        setup.configure_provider(Provider(), make_policy(key))


def test_fused_norms_of_transformer_engine_are_refused(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "resolve_transformer_impl", lambda _name: "transformer_engine")
    with pytest.raises(ConfigError, match=r"^policy.megatron_cfg.offload_modules: \['mlp_norm'\] have no boundary"):
        setup.configure_provider(Provider(num_moe_experts=None), make_policy("offload_modules=[core_attn,mlp_norm]"))


def test_the_input_of_recomputed_layers_needs_no_norm_of_its_own(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "resolve_transformer_impl", lambda _name: "transformer_engine")
    full = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
    policy = make_policy("offload_modules=[attn_norm]", *full)
    assert setup.configure_provider(Provider(num_moe_experts=None), policy) == "transformer_engine"
    with pytest.raises(ConfigError, match="have no boundary"):
        setup.configure_provider(Provider(num_moe_experts=None), make_policy("offload_modules=[attn_norm]"))


RECOMPUTE_ACT = ("recompute_granularity=selective", "recompute_modules=[mlp_act]")


@pytest.mark.parametrize(
    ("impl", "overrides", "opened"),
    [
        ("transformer_engine", (), True),
        ("transformer_engine", ("fine_grained_activation_offloading=false",), False),
        ("transformer_engine", ("activation_offload.engine=megatron",), False),
        ("transformer_engine", ("fine_grained_activation_offloading=false", *RECOMPUTE_ACT), True),
        ("torch", (), False),
    ],
)
def test_dense_mlps_get_regions_where_our_engine_moves_their_tensors(
    impl: str, overrides: tuple[str, ...], opened: bool, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "resolve_transformer_impl", lambda _name: impl)
    provider = Provider(num_moe_experts=None)
    setup.configure_provider(provider, make_policy("offload_modules=[core_attn]", *overrides))
    assert (open_dense_mlps in provider.hooks) is opened


def test_capacity_and_stash_are_not_megatrons(make_policy: MakePolicy) -> None:
    provider = Provider()
    keys = ("transformer_impl=torch", "moe_expert_rank_capacity_factor=1.5", "moe_paged_stash=true")
    setup.configure_provider(provider, make_policy(*keys))
    assert provider.moe_expert_rank_capacity_factor == 1.5
    assert provider.moe_paged_stash is False, "Megatron's schedules would start their own"


@pytest.mark.parametrize("is_latent", [False, True])
def test_auto_opens_what_a_list_may_have_beside_recomputation(make_policy: MakePolicy, is_latent: bool) -> None:
    """Without latent attention, `layernorm` in `recompute_modules` discards nothing of attention's."""
    provider = Provider(multi_latent_attention=is_latent)
    recomputed = ("recompute_granularity=selective", "recompute_modules=[layernorm]")
    setup.apply_policy(provider, make_policy("offload_modules=auto", *recomputed), "torch")
    discarded = {"qkv_linear", "shared_experts"} if is_latent else {"shared_experts"}
    assert set(NATIVE_MODULES) - set(provider.offload_modules or ()) == discarded


def test_a_model_for_torch_layers_is_built_without_fusions(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Transformer Engine is; its optimizer takes these weights too."""
    fused = ("transformer_impl=auto", "apply_rope_fusion=true", "moe_permute_fusion=true")
    policy = make_policy(*fused, "optimizer.use_precision_aware_optimizer=true")
    with pytest.raises(ConfigError, match="use_precision_aware_optimizer needs Transformer Engine"):
        setup.configure_provider(Provider(), policy, needs_torch=True)
    monkeypatch.setattr(setup, "_transformer_engine_problem", lambda: None)
    provider = Provider()
    assert setup.configure_provider(provider, policy, needs_torch=True) == "torch"
    assert (provider.apply_rope_fusion, provider.moe_permute_fusion) == (False, False)
    with pytest.raises(ConfigError, match=r"fp8_cfg\.enabled needs Transformer Engine"):
        setup.configure_provider(Provider(), make_policy(*fused, "fp8_cfg.enabled=true"), needs_torch=True)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize(
    ("impl", "asked"),
    [("torch", "null"), ("torch", "false"), *(("transformer_engine", asked) for asked in ("null", "true", "false"))],
)
def test_positions_are_rotated_by_a_kernel_that_does_what_the_model_says(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, factor: float, asked: str, impl: str
) -> None:
    """A pack rotated by Transformer Engine's kernel lost YaRN's factor, where the user asked for the kernel."""
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(f"megatron.core.models.common.embeddings.rope_utils.{name}", object())
    model = json.loads((PROJECT_ROOT / "examples/models/tiny_speller/config.json").read_text())
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32}
    provider = provider_for(model | {"rope_parameters": rope})
    policy = make_policy("transformer_impl=auto", "offload_modules=[core_attn]", f"apply_rope_fusion={asked}")
    setup.apply_policy(provider, policy, impl)
    assert provider.apply_rope_fusion is (impl == "transformer_engine" and factor == 1 and asked != "false")
