"""What NeMo-RL says of GRPO elsewhere or otherwise: its single controller, and rewards of responses without an end.

The single controller generates ahead of training by `async_rl`, whose sampler says which responses a step takes. Here a
step trains on the responses that were generated for it; each sampler's bound on versions is the age that is allowed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_offload.config.full_schema import section_at
from nemo_rl_offload.config.nemo_rl.translation import NOT_ALLOWED, Translation, refuse, shown
from nemo_rl_offload.config.schema import AsyncGRPOConfig
from nemo_rl_offload.config.types import defaults_of, keys_of
from nemo_rl_offload.errors import nearest

_ASYNC, _SAMPLER = "grpo.async_grpo", "async_rl.sampler"
_BOUNDS = {
    "in_order": "max_lookahead_versions",
    "windowed": "max_staleness_versions",
    "weight_fifo": "max_staleness_versions",
    "ready_first": "max_staleness_versions",
}
"""The key of each sampler that bounds the versions between a response and its training."""


def _single_controller(translation: Translation) -> None:
    if translation.honoured.get("async_rl") is None:
        return
    if "async_grpo" not in keys_of(section_at([translation.get("algorithm")])):
        translation.without_effect["async_rl"] = "the algorithm generates nothing ahead"
        return
    if translation.get(f"{_ASYNC}.enabled") is True:
        translation.problems["async_rl"] = (
            f"is not allowed beside {_ASYNC}.enabled: true: both say what is generated ahead. Set {_ASYNC} to null."
        )
        return
    sampler = translation.honoured.get(_SAMPLER) or {}
    bound = _bound(translation, sampler)
    if bound is None:
        return
    recompute = "recompute_kv_cache_after_weight_updates"
    section = {**defaults_of(AsyncGRPOConfig), "enabled": bound > 0}
    if bound:
        section |= {
            "max_trajectory_age_steps": bound,
            "in_flight_weight_updates": True,
            recompute: translation.honoured.get(f"async_rl.{recompute}", False),
        }
        if sampler.get("name", "in_order") != "in_order":
            translation.warnings.append(
                f"{_SAMPLER}.name: {sampler['name']}: a step trains on the responses of its own prompts, at most "
                f"{bound} versions old; NeMo-RL takes those that are ready first, of any prompts."
            )
    translation.set(_ASYNC, section, _SAMPLER)


def _bound(translation: Translation, sampler: Mapping[str, Any]) -> int | None:
    """Versions that responses may be behind; None where the sampler has a problem, which is noted."""
    name = sampler.get("name", "in_order")
    if name == "custom":
        how = f"Set it to {', '.join(_BOUNDS)}."
        refuse(translation, f"{_SAMPLER}.name", name, "a sampler of one's own", "a step has its own responses", how)
        return None
    if not isinstance(name, str) or name not in _BOUNDS:
        translation.problems[f"{_SAMPLER}.name"] = (
            f"{shown(name)} {NOT_ALLOWED}{', '.join(_BOUNDS)}.{nearest(str(name), _BOUNDS)}"
        )
        return None
    key = _BOUNDS[name]
    for other in sampler.keys() - {"name", key, "sample_freshest_first"}:
        known = {each for each in _BOUNDS.values() if each in sampler}
        if other in known:  # inherited from a file with another sampler
            translation.without_effect[f"{_SAMPLER}.{other}"] = f"read by other samplers than {name}"
        else:
            translation.problems[f"{_SAMPLER}.{other}"] = f"unknown key.{nearest(other, ('name', key))}"
    if "sample_freshest_first" in sampler:
        translation.without_effect[f"{_SAMPLER}.sample_freshest_first"] = "a step has its own responses"
    bound = sampler.get(key, 1)
    if type(bound) is not int or bound < 0:
        translation.problems[f"{_SAMPLER}.{key}"] = f"{shown(bound)} {NOT_ALLOWED}a whole number from 0."
        return None
    return bound


def _cut_responses(translation: Translation) -> None:
    """A factor for rewards of responses without an end, in place of DAPO's penalty for long ones."""
    section = "grpo.reward_shaping"
    path = f"{section}.stop_properly_penalty_coef"
    factor = translation.honoured.get(path)
    if factor is None or translation.get(f"{section}.enabled") is not True:
        return
    reason = "a response without an end has the reward 0, whatever its text"
    if factor != 0:
        refuse(translation, path, factor, "rewards of responses without an end", reason, "Set it to 0.0, or null.")
        return
    scaling = translation.get("grpo.reward_scaling")
    if isinstance(scaling, Mapping) and scaling.get("enabled"):
        reason = "grpo.reward_scaling gives such responses another reward than 0"
        refuse(translation, path, factor, "a factor behind scaled rewards", reason, "Set it to null.")
        return
    translation.set(f"{section}.enabled", False, path)
    for key in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
        if f"{section}.{key}" in translation.given:
            translation.without_effect[f"{section}.{key}"] = "stop_properly_penalty_coef is in its place"


GRPO_STEPS: tuple[Callable[[Translation], None], ...] = (_single_controller, _cut_responses)
