"""What NeMo-RL says of NeMo-Gym: a section that holds anything, and penalties for turns, each with a switch."""

from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_offload.config.full_schema import section_at
from nemo_rl_offload.config.nemo_rl.translation import Translation, refuse, shown
from nemo_rl_offload.config.types import defaults_of

GYM = "env.nemo_gym"
_ENGINE = "policy.generation.vllm_cfg"
_OF_NEMO_RL: Mapping[str, tuple[Any, str, str]] = {
    "effort_levels": (None, "rewards by effort", "an episode's reward is its environment's"),
    "is_trajectory_collection": (False, "collecting trajectories", "a run trains"),
    "train_on_all_session_traces": (False, "several traces of an episode", "an episode is one conversation"),
}
"""Keys of the section that NeMo-RL takes for itself: the value that asks for nothing, the feature, and the reason."""
_RETRIES = "rollout_max_attempts_to_avoid_lp_nan"
_PENALTIES = ("invalid_tool_call", "malformed_thinking")


def gather_gym(values: dict[str, Any]) -> dict[str, Any]:
    """With the section's further keys below its `config`, as NeMo-Gym is told them."""
    env = values.get("env")
    section = env.get("nemo_gym") if isinstance(env, Mapping) else None
    if not isinstance(env, Mapping) or not isinstance(section, Mapping):
        return values
    defaults = defaults_of(section_at(GYM.split(".")))
    told = {key: value for key, value in section.items() if key not in defaults}
    kept = defaults | {key: value for key, value in section.items() if key in defaults and value is not None}
    if told and isinstance(given := kept["config"], Mapping):
        kept["config"] = {**told, **given}
    return {**values, "env": {**env, "nemo_gym": kept}}


def _section(translation: Translation) -> None:
    config = translation.get(f"{GYM}.config")
    if not isinstance(config, Mapping):
        return
    for key, (idle, feature, reason) in _OF_NEMO_RL.items():
        if config.get(key, idle) not in (None, idle):
            refuse(translation, f"{GYM}.{key}", config[key], feature, reason, f"Set it to {shown(idle)}.")
    if _RETRIES in config:
        translation.without_effect[f"{GYM}.{_RETRIES}"] = "log-probabilities that are no numbers end a run"
    taken = {*_OF_NEMO_RL, _RETRIES}
    translation.set(f"{GYM}.config", {key: value for key, value in config.items() if key not in taken})


def _environment(translation: Translation) -> None:
    source = "env.should_use_nemo_gym"
    is_gym, wanted = translation.get("data.env_name") == "nemo_gym", translation.honoured.get(source)
    if wanted and not is_gym:
        translation.set("data.env_name", "nemo_gym", source)
    elif wanted is False and is_gym:
        translation.problems[source] = "false is not allowed while data.env_name is nemo_gym. Set it to true."
    flagged = "env.should_mask_flagged_samples"
    if flagged in translation.honoured:
        translation.set(f"{GYM}.mask_flagged_samples", translation.honoured[flagged], flagged)
    served = "policy.generation.mcore_generation_config.expose_http_server"
    if served in translation.honoured and translation.get("policy.generation.backend") == "vllm":
        translation.without_effect[served] = "vLLM generates"
    elif translation.honoured.get(served):
        reason = "responses go to the driver alone"
        refuse(translation, served, True, "a server for other programs", reason, "Set it to false.")
    served = f"{_ENGINE}.expose_http_server"
    if translation.honoured.get(served) and translation.get("data.env_name") != "nemo_gym":
        reason = "chats are served to NeMo-Gym alone"
        refuse(translation, served, True, "a server for other programs", reason, "Set it to false.")
    elif served in translation.honoured:
        translation.without_effect[served] = "data.env_name says it"


def _penalties(translation: Translation) -> None:
    for name in _PENALTIES:
        switch, advantage = f"grpo.penalize_{name}", f"grpo.{name}_advantage"
        if (is_on := translation.honoured.get(switch)) is None:
            continue
        if is_on and translation.get(advantage) is None:
            translation.problems[switch] = f"true needs an advantage for such turns. Give one: {advantage}=-5.0"
        elif not is_on and translation.get(advantage) is not None:
            translation.set(advantage, None, switch)
            translation.without_effect[advantage] = f"{switch} is false"


GYM_STEPS: tuple[Callable[[Translation], None], ...] = (_section, _environment, _penalties)
