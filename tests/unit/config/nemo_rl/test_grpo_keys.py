"""What NeMo-RL's single controller, and its reward of responses without an end, become here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.cli.check import check_file
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.sources import LoadedConfig

AHEAD = {"enabled": True, "in_flight_weight_updates": True, "recompute_kv_cache_after_weight_updates": False}
SHAPED = "grpo: {reward_shaping: {enabled: true, stop_properly_penalty_coef: %s}}"


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], LoadedConfig]:
    def read_text(text: str) -> LoadedConfig:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return read_recipe(path)

    return read_text


@pytest.mark.parametrize(
    ("sampler", "wanted"),
    [
        ("{name: in_order, max_lookahead_versions: 0}", {"enabled": False}),
        ("{name: in_order, max_lookahead_versions: 2}", AHEAD | {"max_trajectory_age_steps": 2}),
        ("{name: windowed, max_staleness_versions: 3}", AHEAD | {"max_trajectory_age_steps": 3}),
        ("{name: weight_fifo, max_staleness_versions: 0}", {"enabled": False}),
        ("{name: ready_first}", AHEAD | {"max_trajectory_age_steps": 1}),
        ("{}", AHEAD | {"max_trajectory_age_steps": 1}),
        ("{name: windowed, max_lookahead_versions: 5}", AHEAD | {"max_trajectory_age_steps": 1}),
    ],
)
def test_a_samplers_bound_is_the_age_that_is_allowed(
    sampler: str, wanted: dict[str, Any], read: Callable[[str], LoadedConfig]
) -> None:
    loaded = read(f"grpo: {{async_grpo: null}}\nasync_rl: {{max_inflight_prompts: 4, sampler: {sampler}}}")
    assert loaded.refused == {}
    section = loaded.values["grpo"]["async_grpo"]
    assert {key: section[key] for key in wanted} == wanted
    takes_any = wanted["enabled"] and "name" in sampler and "in_order" not in sampler
    assert any("that are ready first" in note for note in loaded.notes) is takes_any
    assert "async_rl.max_inflight_prompts" in loaded.without_effect


def test_keys_and_values_are_computed_anew_where_the_controller_does(read: Callable[[str], LoadedConfig]) -> None:
    section = read("grpo: {}\nasync_rl: {recompute_kv_cache_after_weight_updates: true}").values["grpo"]["async_grpo"]
    assert section["recompute_kv_cache_after_weight_updates"] is True


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("grpo: {}\nasync_rl: {sampler: {name: custom, target: a:B}}", "async_rl.sampler.name", "a sampler of one's own, not"),  # noqa: E501
        ("grpo: {}\nasync_rl: {sampler: {name: inorder}}", "async_rl.sampler.name", "Did you mean 'in_order'?"),
        ("grpo: {}\nasync_rl: {sampler: {name: [1]}}", "async_rl.sampler.name", "is not allowed"),
        ("grpo: {}\nasync_rl: {sampler: {max_lookahead_versions: -1}}", "async_rl.sampler.max_lookahead_versions", "a whole number from 0"),  # noqa: E501
        ("grpo: {}\nasync_rl: {sampler: {max_lookahead_versions: true}}", "async_rl.sampler.max_lookahead_versions", "a whole number from 0"),  # noqa: E501
        ("grpo: {}\nasync_rl: {sampler: {max_lookahed_versions: 1}}", "async_rl.sampler.max_lookahed_versions", "Did you mean 'max_lookahead_versions'?"),  # noqa: E501
        ("grpo: {}\nasync_rl: {diagnostic: true}", "async_rl.diagnostic", "Did you mean 'diagnostics'?"),
        ("grpo: {async_grpo: {enabled: true}}\nasync_rl: {}", "async_rl", "both say what is generated ahead"),
        (SHAPED % 0.5, "grpo.reward_shaping.stop_properly_penalty_coef", "Set it to 0.0, or null"),
        (SHAPED % "0.0}, reward_scaling: {enabled: true", "grpo.reward_shaping.stop_properly_penalty_coef", "Set it to null"),  # noqa: E501
        ("grpo: {}\nenv: {sliding_puzzle_game: {cfg: {}}}", "env.sliding_puzzle_game", "games, not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, path: str, said: str, read: Callable[[str], LoadedConfig]) -> None:
    assert said in read(text).refused[path]


def test_responses_without_an_end_have_no_other_penalty(read: Callable[[str], LoadedConfig]) -> None:
    """Their reward is 0 already; the factor takes the place of DAPO's penalty."""
    loaded = read(SHAPED % "0.0, overlong_buffer_penalty: 3.0")
    assert loaded.refused == {}
    assert loaded.values["grpo"]["reward_shaping"]["enabled"] is False
    assert "grpo.reward_shaping.overlong_buffer_penalty" in loaded.without_effect
    assert read(SHAPED % "null").values["grpo"]["reward_shaping"]["enabled"] is True


@pytest.mark.parametrize(
    ("keys", "comparison"),
    [
        ("", "symbolic"),
        ("verifier_type: math, math_verify_impl: hf_math_verify", "symbolic"),
        ("math_verify_impl: dapo_math_verify", "dapo"),
        ("verifier_type: english_multichoice", "english_multichoice"),
        ("verifier_type: multilingual_multichoice, math_verify_impl: dapo_math_verify", "multilingual_multichoice"),
        ("verifier_type: null, math_verify_impl: null", "symbolic"),
    ],
)
def test_verifiers_of_mathematics(keys: str, comparison: str, read: Callable[[str], LoadedConfig]) -> None:
    loaded = read(f"grpo: {{}}\nenv: {{math: {{num_workers: 3, {keys}}}}}")
    assert loaded.refused == {}
    assert loaded.values["env"]["math"]["comparison"] == comparison
    assert loaded.values["env"]["math"]["num_workers"] == 3
    for key in ("verifier_type", "math_verify_impl"):
        assert "is not allowed" in read(f"grpo: {{}}\nenv: {{math: {{{key}: maths}}}}").refused[f"env.math.{key}"]


def test_values_of_other_switches_have_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    ddp = "distributed_data_parallel_config: {overlap_grad_reduce: false, overlap_param_gather: true}"
    path.write_text(
        "grpo: {}\nlogger: {log_dir: x}\ncheckpointing: {enabled: false, checkpoint_must_save_by: 00:47:35:00}\n"
        f"policy: {{megatron_cfg: {{moe_flex_dispatcher_backend: deepep, {ddp}}}}}\n"
    )
    found = check_file(path, [])
    idle = {
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
        "policy.megatron_cfg.moe_flex_dispatcher_backend",
        "checkpointing.checkpoint_must_save_by",
    }
    assert not idle & {each.path for each in found.problems}
    assert idle <= {each.path for each in found.without_effect}


def test_a_key_that_others_refer_to_is_a_value_of_its_authors(read: Callable[[str], LoadedConfig]) -> None:
    loaded = read("grpo: {}\nroot: /data\nextra: 1\ndata: {train: {path: '${root}/train.jsonl'}}")
    assert loaded.values["data"]["train"]["path"] == "/data/train.jsonl"
    assert "root" in loaded.without_effect
    assert "unknown key" in loaded.refused["extra"]
