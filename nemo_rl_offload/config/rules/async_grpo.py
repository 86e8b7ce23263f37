"""Rules about generating ahead of training, and about the correction for responses of other weights."""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import Get, Rule, algorithm_has, algorithm_spec
from nemo_rl_offload.config.rules.vllm import BACKEND, CFG, GENERATION

ASYNC = "grpo.async_grpo"
TIS = "loss_fn.truncated_importance_sampling"
CORRECTION = "loss_fn.use_importance_sampling_correction"


def is_ahead(get: Get) -> bool:
    """Whether a run generates ahead of training."""
    return bool(algorithm_has("async_grpo", get) and get(f"{ASYNC}.enabled"))


def _ahead(get: Get) -> Iterator[str]:
    if not is_ahead(get):
        return
    path = f"{ASYNC}.enabled: true"
    if get(BACKEND) != "vllm":
        yield (
            f"{BACKEND}: megatron asks for asynchronous GRPO by Megatron-Core, not supported here: it does not "
            f"generate while a step trains. Set it to vllm, or {ASYNC}.enabled to false."
        )
    elif not get(f"{CFG}.async_engine"):
        yield f"{CFG}.async_engine: {path} needs an engine that goes on between batches. Set it to true."
    if get(f"{GENERATION}.colocated.enabled"):
        yield (
            f"{GENERATION}.colocated.enabled: {path} generates while a step trains, on devices of their own. Set it to "
            f"false, and {GENERATION}.colocated.resources."
        )
    if get("grpo.use_dynamic_sampling"):
        yield f"grpo.use_dynamic_sampling: {path} does not sample again what it drops. Set it to false."


def _older_than_it_can_be(get: Get) -> Iterator[str]:
    age = get(f"{ASYNC}.max_trajectory_age_steps")
    if is_ahead(get) and age == 0:
        yield (
            f"{ASYNC}.max_trajectory_age_steps: 0 lets each step wait for its own responses, as without "
            f"{ASYNC}.enabled: nothing is generated ahead."
        )
    elif is_ahead(get) and age > 1 and not get(f"{ASYNC}.in_flight_weight_updates"):
        yield (
            f"{ASYNC}.max_trajectory_age_steps: above 1 while in_flight_weight_updates is false, each update waits for "
            "all that is under way: responses are older, and no step is faster."
        )


def _older_responses_as_new(get: Get) -> Iterator[str]:
    if is_ahead(get) and not get(CORRECTION):
        yield (
            f"{CORRECTION}: false while {ASYNC}.enabled is true: responses of older weights are trained on as if they "
            "were of the newest. true corrects for it."
        )


def _nothing_is_under_way(get: Get) -> Iterator[str]:
    path, other = (f"{ASYNC}.{key}" for key in ("recompute_kv_cache_after_weight_updates", "in_flight_weight_updates"))
    if is_ahead(get) and get(path) and not get(other):
        yield (
            f"{path}: true has no effect while {other} is false: weights change where no response is under way. Set "
            "that to true, or this to false."
        )


def _bounds(get: Get) -> Iterator[str]:
    if not algorithm_spec(get).loss_fn_keys or not get(CORRECTION):
        return
    kind, most, least = (get(f"{TIS}_{key}") for key in ("type", "ratio", "ratio_min"))
    if kind is not None and most is None:
        yield f"{TIS}_ratio: missing value: the largest weight of {kind}. Give one, or set {TIS}_type to null."
    if kind in ("icepop", "seq-mask-tis") and least is None:
        yield f"{TIS}_ratio_min: missing value: {kind} leaves out what is below it. Give one."
    if most is not None and least is not None and least > most:
        yield f"{TIS}_ratio_min: {least} is more than {TIS}_ratio = {most}. Set at most that."
    if kind == "seq-mask-tis" and get("loss_fn.sequence_level_importance_ratios"):
        yield (
            f"{TIS}_type: seq-mask-tis weighs tokens, and sequence_level_importance_ratios: true responses. Set icepop "
            "or tis."
        )


ASYNC_RULES: tuple[Rule, ...] = (_ahead, _bounds)
ASYNC_WARNINGS: tuple[Rule, ...] = (_older_than_it_can_be, _older_responses_as_new, _nothing_is_under_way)
