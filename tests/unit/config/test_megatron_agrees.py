"""Megatron-Core refuses nothing that the rules accept, and its fields receive what the configuration says."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mutations import megatron_changes, refused
from providers import Model, build, make_models, pretend_transformer_engine

from nemo_rl_offload.config.rules.megatron import transformer_fields
from nemo_rl_offload.config.validation import examine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    return make_models(tmp_path_factory.mktemp("models"))


def left_to_megatron(raw: dict[str, Any]) -> bool:
    return "use_mup" in raw["policy"]["megatron_cfg"]["model_overrides"]


def check_agreement(model: Model, changes: dict[tuple[str, ...], Any]) -> bool:
    """Build what the rules accept; return whether they did."""
    raw = model.raw(changes)
    if left_to_megatron(raw) or refused(raw):
        return False
    build(model, raw)
    return True


def check_many(models: list[Model], num_accepted: int, part: int = 0) -> None:
    accepted = []

    @seed(part)
    @given(changes=megatron_changes(), index=st.integers(0, 1))
    @settings(max_examples=8 * num_accepted, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(changes: dict[tuple[str, ...], Any], index: int) -> None:
        accepted.append(check_agreement(models[index], changes))

    run()
    assert sum(accepted) >= num_accepted


def check_many_with_transformer_engine(models: list[Model], num_accepted: int, part: int = 0) -> None:
    """The same for configurations that need Transformer Engine, which only a run must have."""
    from nemo_rl_offload.megatron.build.transformer_config import apply_policy

    accepted = []

    @seed(part)
    @given(
        changes=st.tuples(megatron_changes(), megatron_changes()),
        engine=st.sampled_from(["native", "megatron"]),
        index=st.integers(0, 1),
    )
    @settings(max_examples=8 * num_accepted, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(changes: tuple[dict[tuple[str, ...], Any], ...], engine: str, index: int) -> None:
        of_te = {("transformer_impl",): "transformer_engine", ("activation_offload", "engine"): engine}
        raw = models[index].raw(changes[0] | changes[1] | of_te)
        found = examine(raw, run_here=False).problems
        if not left_to_megatron(raw) and not found:
            apply_policy(models[index].provider(), raw["policy"], "transformer_engine")
            accepted.append(engine)

    run()
    assert len(accepted) >= num_accepted
    assert set(accepted) == {"native", "megatron"}


@pytest.mark.slow
def test_megatron_refuses_nothing_that_is_accepted_with_transformer_engine(
    models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_transformer_engine(monkeypatch)
    check_many_with_transformer_engine(models, 15)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("part", range(1, 5))
def test_megatron_refuses_nothing_of_much_with_transformer_engine(
    part: int, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_transformer_engine(monkeypatch)
    check_many_with_transformer_engine(models, 50, part)


@pytest.mark.slow
def test_megatron_refuses_nothing_that_is_accepted(models: list[Model]) -> None:
    check_many(models, 30)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("part", range(1, 5))
def test_megatron_refuses_nothing_of_much_that_is_accepted(part: int, models: list[Model]) -> None:
    check_many(models, 100, part)


@pytest.fixture
def _without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_offload.config.rules.machine.have_transformer_engine", lambda: False)
    problem = "nemo_rl_offload.megatron.build.transformer_config.transformer_engine_problem"
    monkeypatch.setattr(problem, lambda: "it is not installed")


@pytest.mark.usefixtures("_without_transformer_engine")
@given(changes=megatron_changes(), index=st.integers(0, 1))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_forwarded_fields_are_those_of_a_config_that_megatron_builds(
    models: list[Model], changes: dict[tuple[str, ...], Any], index: int
) -> None:
    from megatron.core.transformer import TransformerConfig

    from nemo_rl_offload.megatron.build import transformer_config as setup

    model = models[index]
    raw = model.raw(changes)
    if left_to_megatron(raw) or refused(raw):
        return
    built, untouched, cfg = build(model, raw), model.provider(), raw["policy"]["megatron_cfg"]
    offload = cfg["fine_grained_activation_offloading"]
    activations = setup._resolve(untouched, raw["policy"], "torch")
    view = activations.megatron_view
    given_fields = setup._transformer_fields(untouched, raw["policy"], activations) | view
    names = {field.name for field in fields(TransformerConfig) if field.init}
    own = {name: getattr(untouched, name) for name in names}
    expected = TransformerConfig(**own | {name: value for name, value in given_fields.items() if name in names})
    forwarded = {*setup.FORWARDED, *setup.FORWARDED_UNLESS_NULL, *view} & names
    of_this_project = {"fine_grained_activation_offloading", "offload_modules", "moe_expert_rank_capacity_factor"}
    forwarded -= of_this_project  # set after Megatron's checks, which know other meanings of them
    assert len(forwarded) >= 40
    assert {name: getattr(built, name) for name in forwarded} == {name: getattr(expected, name) for name in forwarded}
    assert built.moe_expert_rank_capacity_factor == cfg["moe_expert_rank_capacity_factor"]
    if offload is not None:
        assert built.fine_grained_activation_offloading is offload
        assert built.offload_modules == (list(cfg["offload_modules"]) if offload else [])


def test_false_clears_what_a_provider_says_and_null_keeps_it(models: list[Model]) -> None:
    from nemo_rl_offload.megatron.build.transformer_config import configure_provider

    for value, modules, expected in [(None, None, ["core_attn"]), (False, None, []), (True, ["mlp_fc1"], ["mlp_fc1"])]:
        provider = models[0].provider()
        provider.fine_grained_activation_offloading, provider.offload_modules = True, ["core_attn"]
        changes = {("fine_grained_activation_offloading",): value, ("offload_modules",): modules}
        configure_provider(provider, models[0].raw(changes)["policy"])
        assert provider.fine_grained_activation_offloading is (value is not False)
        assert provider.offload_modules == expected


def test_activation_checkpointing_recomputes_whole_layers(models: list[Model]) -> None:
    for value, expected in [(True, ("full", "uniform", 1)), (False, (None, None, None)), (None, (None, None, None))]:
        built = build(models[0], models[0].raw({("activation_checkpointing",): value}))
        assert (built.recompute_granularity, built.recompute_method, built.recompute_num_layers) == expected


def test_null_keeps_what_a_provider_says(models: list[Model]) -> None:
    from nemo_rl_offload.megatron.build.transformer_config import configure_provider

    provider = models[1].provider()
    provider.moe_router_dtype, provider.layernorm_epsilon = "fp64", 0.25
    configure_provider(provider, models[1].raw({})["policy"])
    assert (provider.moe_router_dtype, provider.layernorm_epsilon) == ("fp64", 0.25)
    configure_provider(provider, models[1].raw({("moe_router_dtype",): "fp32"})["policy"])
    assert provider.moe_router_dtype == "fp32"


def test_frozen_routers(models: list[Model]) -> None:
    from megatron.core.transformer.moe.router import Router

    class NoRouter(Router):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(torch.ones(1))

        def routing(self, logits: torch.Tensor) -> None: ...

        def forward(self, x: torch.Tensor) -> None: ...

    frozen, free = build(models[1], models[1].raw({("freeze_moe_router",): True})), build(models[1], models[1].raw({}))
    chunk = torch.nn.ModuleList([NoRouter(), torch.nn.Linear(1, 1)])
    assert free.pre_wrap_hook is None
    assert frozen.pre_wrap_hook([chunk]) == [chunk]
    assert [parameter.requires_grad for parameter in chunk.parameters()] == [False, True, True]


def test_fields_read_from_megatrons_sources_are_those_of_its_class(models: list[Model]) -> None:
    from megatron.core.transformer import TransformerConfig

    assert set(transformer_fields()) == {field.name for field in fields(TransformerConfig)}


OFFLOAD = {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}
SELECTIVE = {"recompute_granularity": "selective"}
GRAPH = {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}


@pytest.mark.parametrize(
    "changes",
    [
        OFFLOAD | SELECTIVE | {"recompute_modules": ["moe"]},
        OFFLOAD | GRAPH | {"offload_modules": ["core_attn"]},
        OFFLOAD | GRAPH | {"cuda_graph_modules": []},
        OFFLOAD | GRAPH | {"cuda_graph_warmup_steps": 0},
        OFFLOAD | {"cuda_graph_impl": "full_iteration"},
        OFFLOAD | {"cpu_offloading": True},
        {"cpu_offloading": True, "cpu_offloading_num_layers": 4},
        SELECTIVE | {"recompute_modules": ["attn"]},
        SELECTIVE | {"recompute_modules": ["mla_up_proj"]},
        GRAPH | {"cuda_graph_modules": ["moe", "moe_router"]},
        GRAPH | {"cuda_graph_modules": ["mlp"]},
        GRAPH | {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ],
)
def test_what_megatron_refuses_breaks_a_rule(models: list[Model], changes: dict[str, Any]) -> None:
    from nemo_rl_offload.errors import ConfigError

    raw = models[1].raw({(key,): value for key, value in changes.items()})
    assert refused(raw)
    with pytest.raises(ConfigError, match=r"Megatron-Core refuses this configuration: |needs Transformer Engine"):
        build(models[1], raw)
