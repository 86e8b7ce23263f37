"""What `check` says about generating ahead of training, and about bounds of importance weights."""

from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules import vllm
from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.specs.generation import VLLM_VERSION

GENERATION, LOSS, ASYNC = "policy.generation", "loss_fn", "grpo.async_grpo"
TIS = f"{LOSS}.truncated_importance_sampling"
CORRECTED = f"{LOSS}.use_importance_sampling_correction"
AHEAD = (
    f"{GENERATION}.backend=vllm",
    f"{GENERATION}.vllm_cfg.async_engine=true",
    f"{GENERATION}.colocated.enabled=false",
    f"{GENERATION}.colocated.resources.gpus_per_node=1",
    "cluster.gpus_per_node=2",
    f"{CORRECTED}=true",
    f"{ASYNC}.enabled=true",
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(vllm, "installed_vllm", lambda: ("vllm", VLLM_VERSION))


def examined(*overrides: str, exemplar: str = "grpo_tiny") -> Any:
    return examine(load_config(PROJECT_ROOT / f"examples/configs/{exemplar}.yaml", overrides), run_here=False)


def problems(*overrides: str) -> dict[str, str]:
    return {problem.path: problem.message for problem in examined(*overrides).problems}


def warnings(*overrides: str) -> list[str]:
    return [warning.path for warning in examined(*overrides).warnings]


def test_what_it_needs_is_enough() -> None:
    assert problems(*AHEAD) == {}
    assert not [path for path in warnings(*AHEAD) if "async" in path]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        (f"{GENERATION}.backend=megatron", f"{GENERATION}.backend"),
        (f"{GENERATION}.vllm_cfg.async_engine=false", f"{GENERATION}.vllm_cfg.async_engine"),
        (f"{GENERATION}.colocated.enabled=true", f"{GENERATION}.colocated.enabled"),
        ("grpo.use_dynamic_sampling=true", "grpo.use_dynamic_sampling"),
        (f"{ASYNC}.max_trajectory_age_steps=-1", f"{ASYNC}.max_trajectory_age_steps"),
    ],
)
def test_each_missing_part_is_named(override: str, path: str) -> None:
    said = problems(*AHEAD, override)
    assert list(said) == [path]


def test_all_that_is_missing_is_said_at_once() -> None:
    assert set(problems(f"{ASYNC}.enabled=true")) == {f"{GENERATION}.backend", f"{GENERATION}.colocated.enabled"}


def test_ages_without_a_use_are_said() -> None:
    age = f"{ASYNC}.max_trajectory_age_steps"
    assert age in warnings(*AHEAD, f"{age}=0")
    assert age in warnings(*AHEAD, f"{age}=2")
    assert age not in warnings(*AHEAD, f"{age}=2", f"{ASYNC}.in_flight_weight_updates=true")
    for key, value in (("max_trajectory_age_steps", 3), ("in_flight_weight_updates", "true")):
        assert f"{ASYNC}.{key}" in warnings(f"{ASYNC}.{key}={value}"), "not read while it is off"


def test_responses_of_older_weights_are_corrected_for_or_it_is_said() -> None:
    assert CORRECTED in warnings(*AHEAD, f"{CORRECTED}=false")
    assert CORRECTED not in warnings(*AHEAD)


def test_a_cache_is_computed_anew_where_something_is_under_way() -> None:
    path = f"{ASYNC}.recompute_kv_cache_after_weight_updates"
    assert path in warnings(*AHEAD, f"{path}=true", f"{ASYNC}.in_flight_weight_updates=false")
    assert path not in warnings(*AHEAD, f"{path}=true", f"{ASYNC}.in_flight_weight_updates=true")


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (("type=tis",), f"{TIS}_ratio"),
        (("type=icepop", "ratio=2"), f"{TIS}_ratio_min"),
        (("type=seq-mask-tis", "ratio=2"), f"{TIS}_ratio_min"),
        (("type=tis", "ratio=2", "ratio_min=3"), f"{TIS}_ratio_min"),
        (("type=clip", "ratio=2"), f"{TIS}_type"),
    ],
)
def test_bounds_that_do_not_fit_are_named(overrides: tuple[str, ...], path: str) -> None:
    assert list(problems(f"{CORRECTED}=true", *(f"{TIS}_{each}" for each in overrides))) == [path]


@pytest.mark.parametrize(
    "overrides", [(), ("ratio=2",), ("type=tis", "ratio=2"), ("type=icepop", "ratio=5", "ratio_min=0.5")]
)
def test_bounds_that_fit(overrides: tuple[str, ...]) -> None:
    assert problems(f"{CORRECTED}=true", *(f"{TIS}_{each}" for each in overrides)) == {}


def test_a_mask_of_responses_goes_with_weights_of_tokens() -> None:
    masks = (f"{CORRECTED}=true", f"{TIS}_type=seq-mask-tis", f"{TIS}_ratio=1.002", f"{TIS}_ratio_min=0.999")
    assert problems(*masks) == {}
    assert list(
        problems(*masks, f"{LOSS}.sequence_level_importance_ratios=true", f"{LOSS}.token_level_loss=false")
    ) == [f"{TIS}_type"]
