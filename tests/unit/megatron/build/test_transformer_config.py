"""Every key reaches its Megatron field; Megatron's checks run on the view of it, and its refusals are ours."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build import transformer_config as setup
from nemo_rl_offload.megatron.layers.dense_mlp import open_dense_mlps
from nemo_rl_offload.specs.offload_modules import MEGATRON_MODULES, NATIVE_MODULES

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
    ("offload_modules=[moe_act]", "offload_modules", ["moe_act"]),
    ("fine_grained_activation_offloading=false", "fine_grained_activation_offloading", False),
    ("fine_grained_activation_offloading=false", "offload_modules", []),
]


@pytest.mark.parametrize(("override", "name", "value"), KEYS)
def test_a_key_reaches_its_field(override: str, name: str, value: object, make_policy: MakePolicy) -> None:
    provider = Provider()
    setup.configure_provider(provider, make_policy(override))
    assert getattr(provider, name) == value


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
    assert provider.params_dtype == provider.pipeline_dtype == torch.bfloat16
    assert provider.bf16
    assert provider.seq_length == 33
    provider = Provider()
    setup.configure_provider(provider, make_policy("sequence_parallel=true", "tensor_model_parallel_size=2"))
    assert provider.sequence_parallel


OPTIMIZER = {
    "optimizer": "sgd",
    "lr": 0.5,
    "min_lr": 0.25,
    "weight_decay": 0.125,
    "adam_beta1": 0.5,
    "adam_beta2": 0.75,
    "adam_eps": 0.01,
    "sgd_momentum": 0.375,
    "clip_grad": 2.5,
    "use_distributed_optimizer": True,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
}
NEEDS_TRANSFORMER_ENGINE = {"use_precision_aware_optimizer"}


@pytest.mark.parametrize(("key", "value"), OPTIMIZER.items())
def test_optimizer_keys(key: str, value: object, make_policy: MakePolicy) -> None:
    policy = make_policy(f"optimizer.{key}={str(value).lower()}")
    assert getattr(setup.optimizer_config(policy), key) == value
    assert policy["megatron_cfg"]["optimizer"].keys() == OPTIMIZER.keys() | NEEDS_TRANSFORMER_ENGINE
    assert setup.optimizer_config(policy | {"precision": "bfloat16"}).bf16


@pytest.mark.parametrize("key", ["grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather"])
@pytest.mark.parametrize("value", [True, False])
def test_data_parallel_keys(key: str, value: bool, make_policy: MakePolicy) -> None:
    section = "distributed_data_parallel_config"
    distributed = ("optimizer.use_distributed_optimizer=true", f"{section}.overlap_grad_reduce=true")
    policy = make_policy(*distributed, f"{section}.{key}={str(value).lower()}")
    config = setup.ddp_config(policy)
    assert getattr(config, key) is value
    assert config.use_distributed_optimizer


@given(
    st.sampled_from(["torch", "transformer_engine"]),
    st.booleans(),
    st.lists(st.sampled_from(sorted({*MEGATRON_MODULES, *NATIVE_MODULES})), unique=True),
)
def test_megatrons_view(transformer_impl: str, is_offloading: bool, modules: list[str]) -> None:
    view = setup.megatron_view(transformer_impl, is_offloading, modules)
    assert view["transformer_impl"] == {"torch": "local"}.get(transformer_impl, transformer_impl)
    expected = [name for name in modules if is_offloading and name in MEGATRON_MODULES]
    assert view["offload_modules"] == expected
    assert view["fine_grained_activation_offloading"] == (len(expected) > 0)


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
    monkeypatch.setattr(setup, "have_transformer_engine", lambda: has_engine)
    if expected is None:
        with pytest.raises(ConfigError, match=r"^policy.megatron_cfg.transformer_impl: .*use torch or auto"):
            setup.resolve_transformer_impl(name)
    else:
        assert setup.resolve_transformer_impl(name) == expected


def test_optimizer_without_transformer_engine_is_refused(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", None)
    policy = make_policy("optimizer.use_precision_aware_optimizer=true", "optimizer.use_distributed_optimizer=true")
    with pytest.raises(ConfigError, match=r"^policy.megatron_cfg.optimizer: Megatron-Core refuses .*FusedAdam"):
        setup.optimizer_config(policy)


@pytest.mark.parametrize(
    "key", ["apply_rope_fusion=true", "attention_backend=flash", "activation_offload.engine=megatron"]
)
def test_what_torch_layers_cannot_do_is_refused(make_policy: MakePolicy, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^policy.megatron_cfg.{key.split('=')[0]} needs Transformer Engine"):
        setup.configure_provider(Provider(), make_policy(key))


def test_weight_decay_over_the_steps(make_policy: MakePolicy) -> None:
    keys = ("start_weight_decay=0.1", "end_weight_decay=0.5", "weight_decay_incr_style=linear", "lr_warmup_iters=0")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight]}])
    scheduler = setup.learning_rate_scheduler(make_policy(*(f"scheduler.{key}" for key in keys)), optimizer, 4)
    decays = []
    for _ in range(6):
        decays.append(optimizer.param_groups[0]["weight_decay"])
        scheduler.step(increment=1)
    assert decays == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


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


SCHEDULES = [
    (("lr_decay_style=constant",), [1.0] * 6),
    (("lr_warmup_iters=2", "lr_warmup_init=0.5"), [0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
    (("lr_decay_style=linear",), [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
    (("lr_decay_style=linear", "lr_warmup_iters=2"), [0.0, 0.5, 1.0, 0.6, 0.2, 0.2]),
    (("lr_decay_style=cosine", "lr_decay_iters=2"), [1.0, 0.6, 0.2, 0.2, 0.2, 0.2]),
    (("lr_warmup_iters=9", "lr_decay_style=cosine"), [0.0, 1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9]),
]


@pytest.mark.parametrize(("overrides", "expected"), SCHEDULES)
def test_learning_rates(overrides: tuple[str, ...], expected: list[float], make_policy: MakePolicy) -> None:
    defaults = ("lr_warmup_iters=0", "lr_decay_style=constant")
    policy = make_policy(
        "optimizer.lr=1.0",
        "optimizer.min_lr=0.2",
        "optimizer.weight_decay=0.3",
        *(f"scheduler.{override}" for override in (*defaults, *overrides)),
    )
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight]}])
    scheduler = setup.learning_rate_scheduler(policy, optimizer, num_steps=4)
    rates = []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["weight_decay"] == 0.3
        scheduler.step(increment=1)
    assert rates == pytest.approx(expected)


def test_capacity_and_stash_are_not_megatrons(make_policy: MakePolicy) -> None:
    provider = Provider()
    keys = ("transformer_impl=torch", "moe_expert_rank_capacity_factor=1.5", "moe_paged_stash=true")
    setup.configure_provider(provider, make_policy(*keys))
    assert provider.moe_expert_rank_capacity_factor == 1.5
    assert provider.moe_paged_stash is False, "Megatron's schedules would start their own"


def test_auto_leaves_what_the_stash_holds_to_it(make_policy: MakePolicy) -> None:
    policy = make_policy("offload_modules=auto", "moe_paged_stash=true")
    assert not {"expert_fc1", "moe_act", "expert_fc2"} & set(setup.offloaded_modules(policy["megatron_cfg"]))
    assert "shared_experts" in setup.offloaded_modules(policy["megatron_cfg"])


@pytest.mark.parametrize("is_latent", [False, True])
def test_auto_opens_what_a_list_may_have_beside_recomputation(make_policy: MakePolicy, is_latent: bool) -> None:
    """Without latent attention, `layernorm` in `recompute_modules` discards nothing of attention's."""
    provider = Provider(multi_latent_attention=is_latent)
    recomputed = ("recompute_granularity=selective", "recompute_modules=[layernorm]")
    setup.apply_policy(provider, make_policy("offload_modules=auto", *recomputed), "torch")
    discarded = {"qkv_linear", "shared_experts"} if is_latent else {"shared_experts"}
    assert set(NATIVE_MODULES) - set(provider.offload_modules or ()) == discarded
