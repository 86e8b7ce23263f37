"""Rules about the sections of the algorithms."""

import math
from collections.abc import Iterator

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.loader import resolve_data_path, resolve_model_path
from nemo_rl_offload.config.rules.rule import Get, Rule, algorithm_has, algorithm_spec
from nemo_rl_offload.config.rules.runs import takes_problems
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.parallel_layout import nearest_multiple

SPLITS = ("data.train", "data.validation")


def _samples_per_step(get: Get) -> Iterator[str]:
    algorithm, whole = get("algorithm"), get("policy.train_global_batch_size")
    if not algorithm_spec(get).generates:
        return
    prompts, generations = (get(f"{algorithm}.num_{key}") for key in ("prompts_per_step", "generations_per_prompt"))
    if (prompts * generations) % whole:
        yield (
            f"policy.train_global_batch_size: {whole} does not divide the samples of a step, "
            f"{algorithm}.num_prompts_per_step x num_generations_per_prompt = {prompts} x {generations}. "
            f"Set {prompts * generations} for one update per step, or {algorithm}.num_prompts_per_step to "
            f"{nearest_multiple(prompts, whole // math.gcd(whole, generations))}."
        )


def _groups(get: Get) -> Iterator[str]:
    algorithm = get("algorithm")
    for key in ("use_leave_one_out_baseline", "use_dynamic_sampling"):
        if not algorithm_has(key, get) or get(f"{algorithm}.num_generations_per_prompt") > 1:
            return
        if get(f"{algorithm}.{key}"):
            yield (
                f"{algorithm}.num_generations_per_prompt: must be at least 2 while {key} is true. Raise it, or turn "
                "that off."
            )


def _batch_multiplier(get: Get) -> Iterator[str]:
    multiplier = get("grpo.batch_multiplier")
    if multiplier != 1 and not get("grpo.use_dynamic_sampling"):
        yield (
            f"grpo.batch_multiplier: {multiplier} generates responses that nothing uses. Set 1, or "
            "grpo.use_dynamic_sampling=true."
        )


def _overlong_buffer(get: Get) -> Iterator[str]:
    path = "grpo.reward_shaping"
    buffer = get(f"{path}.overlong_buffer_length")
    longest = get(f"{path}.max_response_length") or get("policy.generation.max_new_tokens")
    if get(f"{path}.enabled") and buffer > longest:
        yield f"{path}.overlong_buffer_length: {buffer} is above max_response_length {longest}. Lower it."


def _lengths(get: Get) -> Iterator[str]:
    if not algorithm_spec(get).generates:
        return
    prompt, response = get("data.max_input_seq_length"), get("policy.generation.max_new_tokens")
    total = get("policy.max_total_sequence_length")
    if prompt + response > total:
        yield (
            f"policy.max_total_sequence_length: {total} is less than data.max_input_seq_length {prompt} + "
            f"policy.generation.max_new_tokens {response}. Set at least {prompt + response}."
        )


def _sequence_ratios(get: Get) -> Iterator[str]:
    if get("loss_fn.sequence_level_importance_ratios") and get("loss_fn.token_level_loss"):
        yield (
            "loss_fn.token_level_loss: must be false while sequence_level_importance_ratios is true: one ratio for a "
            "response weighs the response, not its tokens. Set it to false."
        )


def _cispo(get: Get) -> Iterator[str]:
    if get("loss_fn.use_cispo") and get("loss_fn.ratio_clip_c") is not None:
        yield "loss_fn.ratio_clip_c: bounds a loss that use_cispo does not have. Set it to null."


def _teacher(get: Get) -> Iterator[str]:
    if algorithm_spec(get).needs_teacher and get("teacher.model_name") is None:
        yield "teacher.model_name: missing value. Give one: teacher.model_name=..."


def _data_paths(get: Get) -> Iterator[str]:
    spec, algorithm = algorithm_spec(get), get("algorithm")
    train, validation = (get(f"{split}.path") for split in SPLITS)
    if spec.generates and takes_problems(get):
        of_files = " or ".join(name for name, other in ENVIRONMENTS.items() if other.problems == "file")
        for split, path in zip(SPLITS, (train, validation), strict=True):
            if path is not None:
                yield (
                    f"{split}.path: {algorithm} takes its problems from env.reasoning_gym. Set it to null, or "
                    f"data.env_name to {of_files}."
                )
    elif spec.generates and train is None:
        yield (
            f"data.train.path: missing value; data.env_name {get('data.env_name')} takes problems from a file. "
            "Give one: data.train.path=..."
        )
    elif spec.learns_from == "pairs" and train is None:
        yield (
            f"data.train.path: missing value; {algorithm} takes preference pairs from a file. "
            "Give one: data.train.path=..."
        )
    elif (train is None) != (validation is None) and validates(get):
        there, missing = SPLITS if validation is None else reversed(SPLITS)
        yield (
            f"{missing}.path: missing value, while {there}.path is given. Give one, or turn validation off: "
            f"{algorithm}.val_period=0 {algorithm}.val_at_start=false {algorithm}.val_at_end=false"
        )


def validates(get: Get) -> bool:
    """Whether the run measures anything but training."""
    algorithm = get("algorithm")
    return any(get(f"{algorithm}.{key}") for key in ("val_period", "val_at_start", "val_at_end"))


def _metric(get: Get) -> Iterator[str]:
    metric, algorithm = get("checkpointing.metric_name"), get("algorithm")
    allowed = algorithm_spec(get).metrics
    if metric not in allowed:
        yield f"checkpointing.metric_name: {algorithm} has no {metric}. Allowed: {', '.join(allowed)}."
    elif metric.endswith(":loss") == get("checkpointing.higher_is_better"):
        wanted = str(not metric.endswith(":loss")).lower()
        yield f"checkpointing.higher_is_better: keeps the worst checkpoints by {metric}. Set it to {wanted}."


ALGORITHM_RULES: tuple[Rule, ...] = (
    _samples_per_step,
    _groups,
    _lengths,
    _batch_multiplier,
    _overlong_buffer,
    _sequence_ratios,
    _cispo,
    _teacher,
    _data_paths,
    _metric,
)


def _teacher_is_here(get: Get) -> Iterator[str]:
    name = get("teacher.model_name")
    if algorithm_spec(get).needs_teacher and name is not None:
        try:
            resolve_model_path(name)
        except ConfigError as error:
            yield f"teacher.model_name: {error}"


def _data_is_here(get: Get) -> Iterator[str]:
    for split in SPLITS:
        path = get(f"{split}.path")
        if not takes_problems(get) and path is not None:
            try:
                resolve_data_path(path)
            except ConfigError as error:
                yield f"{split}.path: {error}"


ALGORITHM_RULES_OF_THIS_MACHINE: tuple[Rule, ...] = (_teacher_is_here, _data_is_here)
