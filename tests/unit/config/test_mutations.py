"""A changed configuration is accepted or explained, and Megatron-Core refuses nothing that is accepted."""

import copy
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import megatron_changes, mutate, set_at

from nemo_rl_offload.config.checks import check_config
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import ConfigError

Tiny = Callable[..., dict[str, Any]]
MANY = pytest.mark.slow


def refused(raw: dict[str, Any]) -> list[str]:
    """The lines of the error; none where the configuration is accepted."""
    sections = set(raw)
    try:
        checked = check_config(raw)
    except ConfigError as error:
        head, *lines = str(error).splitlines()
        assert head == f"configuration: {len(lines)} problem{'s' if len(lines) > 1 else ''}"
        assert all(line.split(":")[0] for line in lines), lines
        return lines
    assert set(checked.config) == sections
    return []


def check_mutated(tiny: Tiny, data: st.DataObject) -> None:
    raw = tiny()
    mutate(data, raw)
    refused(raw)


def check_changed(tiny: Tiny, changes: dict[tuple[str, ...], Any]) -> None:
    raw = tiny()
    for path, value in changes.items():
        set_at(raw, ("policy", "megatron_cfg", *path), value)
    refused(raw)


@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_a_mutated_configuration_never_ends_in_another_error(tiny: Tiny, data: st.DataObject) -> None:
    check_mutated(tiny, data)


@given(changes=megatron_changes())
@settings(max_examples=250, deadline=None)
def test_contradictory_keys_never_end_in_another_error(tiny: Tiny, changes: dict[tuple[str, ...], Any]) -> None:
    check_changed(tiny, changes)


@MANY
@given(data=st.data())
@settings(max_examples=1500, deadline=None)
def test_many_mutated_configurations(tiny: Tiny, data: st.DataObject) -> None:
    check_mutated(tiny, data)


@MANY
@given(changes=megatron_changes())
@settings(max_examples=1500, deadline=None)
def test_many_contradictory_keys(tiny: Tiny, changes: dict[tuple[str, ...], Any]) -> None:
    check_changed(tiny, changes)


class Model:
    """A Megatron-Bridge provider of a tiny model, made from its configuration alone, and a policy for it."""

    def __init__(self, config: Any, folder: Path) -> None:
        from nemo_rl_offload.megatron.bridge import bridge

        config.save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text("{}")
        self._provider = bridge().AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        self._raw = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [f"policy.model_name={folder}"])

    def raw(self, changes: dict[tuple[str, ...], Any]) -> dict[str, Any]:
        """The tiny exemplar with offloading off and with these changes."""
        raw = copy.deepcopy(self._raw)
        off = {("fine_grained_activation_offloading",): None, ("offload_modules",): None}
        for path, value in (off | changes).items():
            set_at(raw, ("policy", "megatron_cfg", *path), copy.deepcopy(value))
        return raw

    def provider(self) -> Any:
        return copy.deepcopy(self._provider)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    from transformers import Qwen2Config, Qwen3MoeConfig

    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "architectures": ["Qwen2ForCausalLM"],
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    moe = shape | experts | {"architectures": ["Qwen3MoeForCausalLM"]}
    return [
        Model(Qwen2Config(**shape), tmp_path_factory.mktemp("qwen2")),
        Model(Qwen3MoeConfig(**moe), tmp_path_factory.mktemp("qwen3_moe")),
    ]


class NoOptimizer:
    param_groups: list[dict[str, Any]] = []


def build(model: Model, raw: dict[str, Any]) -> Any:
    """Build all of Megatron's configuration objects as a worker does; returns the provider."""
    from nemo_rl_offload.megatron import setup

    provider = model.provider()
    setup.configure_provider(provider, raw["policy"])
    setup.optimizer_config(raw["policy"])
    setup.ddp_config(raw["policy"])
    setup.learning_rate_scheduler(raw["policy"], NoOptimizer(), raw["grpo"]["max_num_steps"])
    return provider


def left_to_megatron(raw: dict[str, Any]) -> bool:
    return "use_mup" in raw["policy"]["megatron_cfg"]["model_overrides"]


def check_agreement(model: Model, changes: dict[tuple[str, ...], Any]) -> bool:
    """Build what the rules accept, also what they only call not available yet; return whether they did."""
    raw = model.raw(changes)
    if left_to_megatron(raw) or any("not available yet" not in line for line in refused(raw)):
        return False
    build(model, raw)
    return True


def check_many(models: list[Model], num_accepted: int) -> None:
    accepted = []

    @given(changes=megatron_changes(), index=st.integers(0, 1))
    @settings(max_examples=4 * num_accepted, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(changes: dict[tuple[str, ...], Any], index: int) -> None:
        accepted.append(check_agreement(models[index], changes))

    run()
    assert sum(accepted) >= num_accepted


def test_megatron_refuses_nothing_that_is_accepted(models: list[Model]) -> None:
    check_many(models, 30)


@MANY
def test_megatron_refuses_nothing_of_much_that_is_accepted(models: list[Model]) -> None:
    check_many(models, 400)


@given(changes=megatron_changes(), index=st.integers(0, 1))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_forwarded_fields_are_those_of_a_config_that_megatron_builds(
    models: list[Model], changes: dict[tuple[str, ...], Any], index: int
) -> None:
    from megatron.core.transformer import TransformerConfig

    from nemo_rl_offload.megatron import setup

    model = models[index]
    raw = model.raw(changes)
    if left_to_megatron(raw) or any("not available yet" not in line for line in refused(raw)):
        return
    built, untouched, cfg = build(model, raw), model.provider(), raw["policy"]["megatron_cfg"]
    offload = cfg["fine_grained_activation_offloading"]
    view = setup.megatron_view("torch", offload, list(cfg["offload_modules"] or []))
    given_fields = setup._transformer_fields(untouched, raw["policy"], "torch") | view
    names = {field.name for field in fields(TransformerConfig) if field.init}
    own = {name: getattr(untouched, name) for name in names}
    expected = TransformerConfig(**own | {name: value for name, value in given_fields.items() if name in names})
    forwarded = {*setup.FORWARDED, *setup.FORWARDED_UNLESS_NULL, *view} & names
    forwarded -= {"fine_grained_activation_offloading", "offload_modules"}
    assert len(forwarded) >= 40
    assert {name: getattr(built, name) for name in forwarded} == {name: getattr(expected, name) for name in forwarded}
    if offload is not None:
        assert built.fine_grained_activation_offloading is offload
        assert built.offload_modules == (list(cfg["offload_modules"]) if offload else [])
