"""What NeMo-RL says of NeMo-Gym becomes this project's section, environment and advantages."""

from collections.abc import Callable
from typing import Any

import pytest
from test_translation import read, value

from nemo_rl_offload.config.nemo_rl.gym import gather_gym
from nemo_rl_offload.config.sources import LoadedConfig

GYM, CFG = "env.nemo_gym", "policy.generation.vllm_cfg"
SERVED, MEGATRON_SERVED = f"{CFG}.expose_http_server", "policy.generation.mcore_generation_config.expose_http_server"
OF_GYM = "grpo: {}\nenv: {should_use_nemo_gym: true}"
Read = Callable[..., LoadedConfig]
__all__ = ["read"]


def test_further_keys_of_the_section_are_what_nemo_gym_is_told(read: Read) -> None:
    section = (
        "config_paths: [a.yaml, b.yaml], policy_model: {responses_api_models: {num_retries: 3}}, num_gpu_nodes: 0,"
        "python: /gym/bin/python, thinking_tags: null, mask_flagged_samples: false"
    )
    loaded = read(f"grpo: {{}}\nenv: {{should_use_nemo_gym: true, nemo_gym: {{{section}}}}}")
    assert loaded.refused == {}
    assert value(loaded, GYM) == {
        "python": "/gym/bin/python",
        "config": {
            "config_paths": ["a.yaml", "b.yaml"],
            "policy_model": {"responses_api_models": {"num_retries": 3}},
            "num_gpu_nodes": 0,
        },
        "mask_flagged_samples": False,
        "invalid_tool_call_patterns": ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"],
        "thinking_tags": ["<think>", "</think>"],
    }


def test_keys_may_also_be_below_config_and_on_the_command_line(read: Read) -> None:
    section = "{config: {config_paths: [a.yaml], dry: 1}, dry: 2, seed: 3}"
    text = f"grpo: {{}}\nenv: {{should_use_nemo_gym: true, nemo_gym: {section}}}"
    assert value(read(text), f"{GYM}.config") == {"config_paths": ["a.yaml"], "dry": 1, "seed": 3}
    given = read(text, f"+{GYM}.port=7", f"{GYM}.seed=4")
    assert value(given, f"{GYM}.config") == {"config_paths": ["a.yaml"], "dry": 1, "seed": 4, "port": 7}


@pytest.mark.parametrize("values", [{}, {"env": None}, {"env": {"math": {}}}, {"env": {"nemo_gym": None}}, {"env": 3}])
def test_without_the_section_nothing_is_gathered(values: dict[str, Any]) -> None:
    assert gather_gym(values) == values


def test_gathering_leaves_what_it_was_given(read: Read) -> None:
    values = {"env": {"nemo_gym": {"dry": 1, "config": {"a": 2}}, "math": {}}, "grpo": {}}
    found = gather_gym(values)
    assert values == {"env": {"nemo_gym": {"dry": 1, "config": {"a": 2}}, "math": {}}, "grpo": {}}
    assert found["env"]["nemo_gym"]["config"] == {"dry": 1, "a": 2}
    assert found["env"]["math"] == found["grpo"] == {}


def test_a_config_that_is_no_mapping_is_left_for_the_types(read: Read) -> None:
    assert gather_gym({"env": {"nemo_gym": {"dry": 1, "config": 3}}})["env"]["nemo_gym"]["config"] == 3


def test_the_switch_names_the_environment(read: Read) -> None:
    assert value(read("grpo: {}\nenv: {}"), "data.env_name") == "reasoning_gym"
    loaded = read(OF_GYM)
    assert loaded.refused == {}
    assert value(loaded, "data.env_name") == "nemo_gym"
    assert "env.should_use_nemo_gym" in str(loaded.origin("data.env_name"))
    off = read("grpo: {}\nenv: {should_use_nemo_gym: false}\ndata: {env_name: math}")
    assert off.refused == {}
    assert value(off, "data.env_name") == "math"


def test_the_switch_must_not_say_otherwise_than_the_environment(read: Read) -> None:
    text = "grpo: {}\nenv: {should_use_nemo_gym: %s}\ndata: {env_name: nemo_gym}"
    assert read(text % "false").refused == {
        "env.should_use_nemo_gym": "false is not allowed while data.env_name is nemo_gym. Set it to true."
    }
    assert read(text % "true").refused == read("grpo: {}\ndata: {env_name: nemo_gym}").refused == {}


@pytest.mark.parametrize("flagged", ["true", "false"])
def test_whether_flagged_episodes_are_learned_from(read: Read, flagged: str) -> None:
    loaded = read(f"{OF_GYM}\n".replace("true}", f"true, should_mask_flagged_samples: {flagged}}}"))
    assert loaded.refused == {}
    assert value(loaded, f"{GYM}.mask_flagged_samples") is (flagged == "true")


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("is_trajectory_collection", "true", "true asks for collecting trajectories, not supported here: a run trains"),
        ("train_on_all_session_traces", "true", "true asks for several traces of an episode, not supported here"),
        ("effort_levels", "{low: 0.5}", "rewards by effort, not supported here"),
        ("effort_levels", "[low]", "rewards by effort, not supported here"),
    ],
)
def test_what_is_not_supported_of_the_section(read: Read, key: str, given: str, said: str) -> None:
    text = "grpo: {}\nenv: {should_use_nemo_gym: true, nemo_gym: {config_paths: [a.yaml], %s}}"
    loaded = read(text % f"{key}: {given}")
    assert list(loaded.refused) == [f"{GYM}.{key}"]
    assert loaded.refused[f"{GYM}.{key}"].startswith(said)
    for idle in ("null", *(["false"] if given == "true" else [])):
        loaded = read(text % f"{key}: {idle}")
        assert loaded.refused == {}
        assert value(loaded, f"{GYM}.config") == {"config_paths": ["a.yaml"]}, "NeMo-Gym is not told"


def test_attempts_at_other_log_probabilities_have_no_effect(read: Read) -> None:
    key = "rollout_max_attempts_to_avoid_lp_nan"
    loaded = read(f"grpo: {{}}\nenv: {{should_use_nemo_gym: true, nemo_gym: {{{key}: 1}}}}")
    assert loaded.without_effect[f"{GYM}.{key}"] == "log-probabilities that are no numbers end a run"
    assert value(loaded, f"{GYM}.config") == {}


@pytest.mark.parametrize("name", ["invalid_tool_call", "malformed_thinking"])
@pytest.mark.parametrize(
    ("switch", "advantage", "wanted"),
    [
        (None, None, None),
        (None, -2.0, -2.0),
        (True, -2.0, -2.0),
        (True, 0.0, 0.0),
        (True, None, "refused"),
        (False, None, None),
        (False, -2.0, None),
    ],
)
def test_penalties_have_a_switch_and_an_advantage(
    read: Read, name: str, switch: bool | None, advantage: float | None, wanted: float | str | None
) -> None:
    key, source = f"grpo.{name}_advantage", f"grpo.penalize_{name}"
    given = "" if switch is None else f", penalize_{name}: {str(switch).lower()}"
    loaded = read(f"grpo: {{{name}_advantage: {'null' if advantage is None else advantage}{given}}}")
    if wanted == "refused":
        assert list(loaded.refused) == [source]
        assert f"Give one: {key}=" in loaded.refused[source]
        return
    assert loaded.refused == {}
    assert value(loaded, key) == wanted
    assert (key in loaded.without_effect) is (switch is False and advantage is not None)


@pytest.mark.parametrize(
    ("is_gym", "backend", "key", "given", "is_refused"),
    [
        (False, "vllm", SERVED, "true", True),
        (False, "vllm", SERVED, "false", False),
        (True, "vllm", SERVED, "true", False),
        (True, "vllm", SERVED, "false", False),
        (False, "megatron", MEGATRON_SERVED, "true", True),
        (True, "megatron", MEGATRON_SERVED, "true", True),
        (False, "megatron", MEGATRON_SERVED, "false", False),
        (False, "vllm", MEGATRON_SERVED, "true", False),
    ],
)
def test_chats_are_served_to_nemo_gym_alone(
    read: Read, is_gym: bool, backend: str, key: str, given: str, is_refused: bool
) -> None:
    text = OF_GYM if is_gym else "grpo: {}\nenv: {}"
    loaded = read(text, f"policy.generation.backend={backend}", f"+{key}={given}")
    assert list(loaded.refused) == ([key] if is_refused else [])
    if is_refused:
        assert loaded.refused[key].startswith("true asks for a server for other programs, not supported here")
    else:
        assert (key in loaded.without_effect) is (key == SERVED or backend == "vllm")
