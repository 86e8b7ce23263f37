"""Rules about what is trained on and how it is scored: prompts, tasks, functions, and the sections of the algorithms.

Sources of reasoning-gym's tasks are read, not imported, which takes seconds. What is looked up on the machine that runs
the configuration, such as files and a user's function, is in `machine.py`.
"""

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.environments import ENVIRONMENTS, num_turns_of
from nemo_rl_offload.config.rules.rule import Get, Rule, algorithm_has, algorithm_spec
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.parallel_layout import nearest_multiple
from nemo_rl_offload.units import parse_bytes, parse_duration

SPLITS = ("data.train", "data.validation")
FUNCTION, TASK_PARAMS = "env.function", "env.reasoning_gym.params"
GIVEN_TO_ALL = ("seed", "size")
"""Parameters of every task that the section `data` gives."""


def takes_problems(get: Get) -> bool:
    """Whether training data are problems of reasoning-gym."""
    spec = algorithm_spec(get)
    if spec.generates:
        return ENVIRONMENTS[get("data.env_name")].problems == "generated"
    return spec.learns_from == "conversations" and get("data.train.path") is None


def _prompt_template(get: Get) -> Iterator[str]:
    template = get("data.prompt_template")
    if template is not None and "{question}" not in template:
        yield "data.prompt_template: has no place for the question. Put {question} into it."


def _generation_workers(get: Get) -> Iterator[str]:
    path = "policy.generation.colocated"
    if not algorithm_spec(get).generates or get(f"{path}.enabled"):
        return
    key = "gpus_per_node" if get("cluster.num_nodes") == 1 else "num_nodes"
    other = "num_nodes" if key == "gpus_per_node" else "gpus_per_node"
    wanted, there = get(f"{path}.resources.{key}"), get(f"cluster.{key}")
    if wanted is None:
        yield f"{path}.resources.{key}: missing value: how many of cluster.{key} generate. Give at least 1."
    elif there != "auto" and wanted >= there:
        yield (
            f"{path}.resources.{key}: {wanted} of cluster.{key}={there} leaves none to train. "
            f"Set cluster.{key} to at least {wanted + 1}."
        )
    whole = 1 if other == "num_nodes" else get("cluster.gpus_per_node")
    if (useless := get(f"{path}.resources.{other}")) not in (None, whole):
        yield (
            f"{path}.resources.{other}: {useless} is not allowed with cluster.num_nodes={get('cluster.num_nodes')}, "
            f"where {path}.resources.{key} says which workers generate. Set it to {json.dumps(whole)}, or null."
        )


def _task(get: Get) -> Iterator[str]:
    task = get("env.reasoning_gym.task")
    names = task_sources()
    if task is None and takes_problems(get):
        yield "env.reasoning_gym.task: missing value. Give one: env.reasoning_gym.task=..."
    elif task is not None and task not in names:
        hint = nearest(task, names) or f" Some of them: {', '.join(sorted(names)[:5])}."
        yield f"env.reasoning_gym.task: '{task}' is none of reasoning-gym's {len(names)} tasks.{hint}"


def _task_params(get: Get) -> Iterator[str]:
    task = get("env.reasoning_gym.task")
    if not takes_problems(get) or task not in task_sources():
        return
    allowed = task_params(task)
    for name in get(TASK_PARAMS):
        if allowed and name not in allowed:
            yield (
                f"{TASK_PARAMS}.{name}: not a parameter of task '{task}'.{nearest(name, allowed)} It has: "
                f"{', '.join(allowed)}. To remove it: ~{TASK_PARAMS}.{name}"
            )


@cache
def task_sources() -> dict[str, Path]:
    """The file of each of reasoning-gym's data sets, by the name of its task."""
    package = find_spec("reasoning_gym")
    assert package is not None
    assert package.submodule_search_locations
    declared = re.compile(r'^(?:DATASET_NAME\s*=|register_dataset\()\s*"(\w+)"', re.MULTILINE)
    sources = Path(package.submodule_search_locations[0]).rglob("*.py")
    return {name: source for source in sources for name in declared.findall(source.read_text(encoding="utf-8"))}


@cache
def task_params(task: str) -> tuple[str, ...]:
    """The parameters of a task, of the class of settings that it is registered with; none where that is not plain."""
    tree = ast.parse(task_sources()[task].read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 2]
    of_task = [call.args[2] for call in calls if getattr(call.func, "id", "") == "register_dataset"]
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = [classes[name.id] for name in of_task if isinstance(name, ast.Name) and name.id in classes]
    if len(of_task) != 1 or len(found) != 1 or found[0].bases:
        return ()
    fields = [node.target for node in found[0].body if isinstance(node, ast.AnnAssign)]
    names = [field.id for field in fields if isinstance(field, ast.Name)]
    return tuple(name for name in names if name not in GIVEN_TO_ALL)


def function_path(get: Get) -> Iterator[str]:
    """A rule: the function that scores responses is named, as package.module:name."""
    path = get(f"{FUNCTION}.path")
    file, _, name = (path or "").partition(":")
    if file.endswith(".py"):
        meant = f"{file.removesuffix('.py').lstrip('./').replace('/', '.')}:{name or 'name'}"
        yield f"{FUNCTION}.path: '{file}' is the name of a file. Write its module and the function, as {meant}."
    elif path is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", path):
        yield f"{FUNCTION}.path: '{path}' names no function. Write it as package.module:name."
    elif path is None and is_scored_by_function(get):
        yield f"{FUNCTION}.path: missing value. Give one: env.function.path=package.module:name"


def _scorer_limits(get: Get) -> Iterator[str]:
    if not algorithm_spec(get).generates:
        return
    section = f"env.{get('data.env_name')}"
    if (limit := get(section).get("memory_limit")) is not None:
        try:
            parse_bytes(limit)
        except ConfigError as error:
            yield f"{section}.memory_limit: {error}"


def _thinking_tags(section: str, get: Get) -> Iterator[str]:
    tags = get(f"{section}.thinking_tags")
    if tags is not None and (len(tags) != 2 or not all(tags) or tags[0] == tags[1]):
        yield (
            f"{section}.thinking_tags: {tags} are not the begin and the end of thinking. "
            "Give two, like [<think>, </think>], or null."
        )


def is_scored_by_function(get: Get) -> bool:
    """Whether responses are scored by a function of the user's."""
    return algorithm_spec(get).generates and f"env.{get('data.env_name')}" == FUNCTION


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
    path, estimator = f"{algorithm}.num_generations_per_prompt", f"{algorithm}.adv_estimator"
    is_alone = algorithm_has("adv_estimator", get) and get(path) == 1
    if is_alone and (get(f"{estimator}.name") != "reinforce_plus_plus" or get(f"{estimator}.minus_baseline")):
        yield (
            f"{path}: must be at least 2: rewards are compared within their group, and one alone has the advantage 0. "
            f"Raise it, or set {estimator}.name=reinforce_plus_plus and {estimator}.minus_baseline=false."
        )
        return
    if algorithm_has("use_dynamic_sampling", get) and get(path) == 1 and get(f"{algorithm}.use_dynamic_sampling"):
        yield f"{path}: must be at least 2 while use_dynamic_sampling is true. Raise it, or turn that off."


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
    num_turns = num_turns_of(get("data.env_name"), get("grpo.max_rollout_turns"))
    longest, of = get(f"{path}.max_response_length"), "max_response_length"
    if not get(f"{path}.enabled"):
        return
    if ENVIRONMENTS[get("data.env_name")].leads_episodes and longest is None:
        yield f"{path}.max_response_length: an agent of {get('data.env_name')} takes any number of turns. Set it."
        return
    if longest is None:
        longest = num_turns * get("policy.generation.max_new_tokens")
        of = "policy.generation.max_new_tokens" + (f" in {num_turns} turns" if num_turns > 1 else "")
    if buffer > longest:
        yield f"{path}.overlong_buffer_length: {buffer} is above the {longest} tokens of {of}. Lower it."


def _lengths(get: Get) -> Iterator[str]:
    if not algorithm_spec(get).generates or ENVIRONMENTS[get("data.env_name")].leads_episodes:
        return
    prompt, response = get("data.max_input_seq_length"), get("policy.generation.max_new_tokens")
    total = get("policy.max_total_sequence_length")
    if response < total < prompt + response and not any(_turns_fit(get)):
        yield (
            f"policy.max_total_sequence_length: {total} is less than data.max_input_seq_length {prompt} + "
            f"policy.generation.max_new_tokens {response}: responses to prompts of over {total - response} tokens are "
            f"cut. Set at least {prompt + response} for whole ones."
        )
    if response > total:
        yield (
            f"policy.generation.max_new_tokens: {response} has no effect above policy.max_total_sequence_length "
            f"{total}, which is for prompt and response together. Lower the one, or raise the other."
        )
    path = f"{get('algorithm')}.max_rollout_turns"
    if algorithm_has("max_rollout_turns", get) and get(path) > 1 and prompt + response <= total < prompt + 2 * response:
        yield (
            f"{path}: no second turn after a prompt and a response of full length, for a turn is begun where "
            f"policy.generation.max_new_tokens {response} have room. Set policy.max_total_sequence_length at least "
            f"{prompt + 2 * response}."
        )


def _profiled_steps(get: Get) -> Iterator[str]:
    path, most = "logger.profile.steps", f"{get('algorithm')}.max_num_steps"
    never = [step for step in get(path) if step > get(most)]
    if never:
        yield f"{path}: step {never[0]} is never taken, for {most} is {get(most)}. Give steps from 1 to that."
    if get("logger.profile.all_ranks") and not get(path):
        yield f"logger.profile.all_ranks: true records nothing without {path}. Give that, or set this to false."


def _turns_fit(get: Get) -> Iterator[str]:
    if not algorithm_has("max_rollout_turns", get) or get(f"{get('algorithm')}.max_rollout_turns") == 1:
        return
    if ENVIRONMENTS[get("data.env_name")].leads_episodes:
        return
    prompt, response = get("data.max_input_seq_length"), get("policy.generation.max_new_tokens")
    if prompt + response > (total := get("policy.max_total_sequence_length")):
        yield (
            f"policy.max_total_sequence_length: {total} is less than data.max_input_seq_length {prompt} + "
            f"policy.generation.max_new_tokens {response}, and a turn that might not fit is not begun. Set at least "
            f"{prompt + response}, or {get('algorithm')}.max_rollout_turns=1."
        )


def _on_policy_ratio(get: Get) -> Iterator[str]:
    path, algorithm = "loss_fn.force_on_policy_ratio", get("algorithm")
    if "force_on_policy_ratio" not in algorithm_spec(get).loss_fn_keys or not get(path):
        return
    samples = get(f"{algorithm}.num_prompts_per_step") * get(f"{algorithm}.num_generations_per_prompt")
    updates = samples // get("policy.train_global_batch_size") * get(f"{algorithm}.ppo_epochs")
    if updates > 1:
        yield (
            f"{path}: true needs steps of one update, and these have {updates}. Set policy.train_global_batch_size to "
            f"{samples} and {algorithm}.ppo_epochs to 1, or this to false."
        )
    if get("loss_fn.use_cispo"):
        yield f"{path}: excluded by use_cispo, which weighs by the ratio. Set one of the two to false."


def _prompt_files(get: Get) -> Iterator[str]:
    for key in ("prompt_file", "system_prompt_file"):
        path = f"data.{key}"
        if get(path) is None:
            continue
        if get("data.prompt_template") is not None:
            yield f"{path}: excluded by data.prompt_template, which has no user's turn. Set one of the two to null."
        turns = f"{get('algorithm')}.max_rollout_turns"
        if algorithm_has("max_rollout_turns", get) and get(turns) > 1:
            yield (
                f"{path}: not for rollouts of several turns, whose later ones have the question alone. Set {turns} to "
                "1, or this to null."
            )
    if get("data.system_prompt_file") is not None and not algorithm_spec(get).generates:
        yield "data.system_prompt_file: given answers have the system turns of their records. Set it to null."


def _sequence_ratios(get: Get) -> Iterator[str]:
    if get("loss_fn.sequence_level_importance_ratios") and get("loss_fn.token_level_loss"):
        yield (
            "loss_fn.token_level_loss: must be false while sequence_level_importance_ratios is true: one ratio for a "
            "response weighs the response, not its tokens. Set it to false."
        )


def _no_clip(get: Get) -> Iterator[str]:
    without = [key for key in ("use_cispo", "disable_ppo_ratio", "force_on_policy_ratio") if get(f"loss_fn.{key}")]
    if without and get("loss_fn.ratio_clip_c") is not None:
        yield f"loss_fn.ratio_clip_c: bounds a loss that {without[0]} does not have. Set it to null."


def _weights_of_losses(get: Get) -> Iterator[str]:
    paths = [f"{get('algorithm')}.{key}" for key in ("preference_loss_weight", "sft_loss_weight")]
    if algorithm_has("preference_loss_weight", get) and not any(map(get, paths)):
        yield f"{paths[0]}: 0, and so is {paths[1]}: nothing would be learned. Set one of them above 0."


def _reinforce(get: Get) -> Iterator[str]:
    path = "loss_fn.disable_ppo_ratio"
    if get(path):
        for other in ("use_cispo", "force_on_policy_ratio", "sequence_level_importance_ratios"):
            if get(f"loss_fn.{other}"):
                yield f"{path}: excluded by {other}, which is about the ratio. Set one of the two to false."


def _several_rewards(get: Get) -> Iterator[str]:
    if not algorithm_has("adv_estimator", get):
        return
    section = f"{get('algorithm')}.adv_estimator"
    if get(f"{section}.name") != "gdpo":
        return
    names, weights = ENVIRONMENTS[get("data.env_name")].reward_names, get(f"{section}.reward_weights")
    if names == ():
        there = ", ".join(name for name, spec in ENVIRONMENTS.items() if spec.reward_names != ())
        yield (
            f"{section}.name: gdpo compares several rewards, and data.env_name {get('data.env_name')} gives one. Set "
            f"this to grpo, or that to one of {there}."
        )
    elif weights is not None and (len(weights) < 2 or (names is not None and len(weights) != len(names))):
        wanted = f"{len(names)}, of {', '.join(names)}" if names else "two or more"
        yield f"{section}.reward_weights: {len(weights)} of them. Give {wanted}."
    if weights is not None and not any(weights):
        yield f"{section}.reward_weights: all are 0, and nothing would be learned. Give one above 0, or null."


def _kl_in_reward(get: Get) -> Iterator[str]:
    if not algorithm_has("adv_estimator", get):
        return
    path, estimator = "loss_fn.use_kl_in_reward", f"{get('algorithm')}.adv_estimator.name"
    if get(path) and get(estimator) != "reinforce_plus_plus":
        yield (
            f"{path}: true takes the divergence out of the loss, and only {estimator}=reinforce_plus_plus has it in "
            "its advantages. Set that, or this to false."
        )


def _intervals(get: Get) -> Iterator[str]:
    """Bounds of which the lower one is not below the upper one."""
    name = get("algorithm")
    pairs = []
    if algorithm_has("reward_scaling", get) and get(f"{name}.reward_scaling.enabled"):
        pairs.append((f"{name}.reward_scaling.source_min", f"{name}.reward_scaling.source_max"))
    if algorithm_has("advantage_clip_low", get):
        pairs.append((f"{name}.advantage_clip_low", f"{name}.advantage_clip_high"))
    for low, high in pairs:
        if None not in (get(low), get(high)) and get(low) >= get(high):
            yield f"{low}: {get(low):g} is not below {high} = {get(high):g}. Set a smaller one."
    low, high = (f"{name}.reward_scaling.target_{end}" for end in ("min", "max"))
    scales = algorithm_has("reward_scaling", get) and get(f"{name}.reward_scaling.enabled")
    if scales and get(low) == get(high):
        yield f"{low}: {get(low):g} is {high} as well: all rewards become the same. Change one."


def _end_by_a_metric(get: Get) -> Iterator[str]:
    name = get("algorithm")
    if not algorithm_has("stop_at_validation_metric", get):
        return
    path, bound = f"{name}.stop_at_validation_metric", f"{name}.stop_at_validation_threshold"
    metric, value = get(path), get(bound)
    if (metric is None) != (value is None):
        given, lacking = (bound, path) if metric is None else (path, bound)
        yield f"{given}: has no effect without {lacking}. Give both, or set both to null."
    elif metric is not None and not (get(f"{name}.val_period") or get(f"{name}.val_at_start")):
        yield (
            f"{path}: has no effect without a validation before the end. Set {name}.val_period above 0, or this and "
            f"{bound} to null."
        )
    if metric in ("accuracy", "pass_k") and isinstance(value, int | float) and value > 1:
        yield f"{bound}: {value:g} is never reached, for {metric} is a share, at most 1. Lower it."
    if metric == "pass_k" and get(f"{name}.val_num_generations_per_prompt") == 1:
        yield f"{path}: pass_k needs several responses. Set {name}.val_num_generations_per_prompt above 1."


MAX_CHOICES = 200_000
"""Of responses to a problem, whose votes are counted one by one."""


def _responses_of_an_evaluation(get: Get) -> Iterator[str]:
    path, k = "eval.num_tests_per_prompt", "eval.k_value"
    if get(path) < get(k):
        yield f"{k}: {get(k)} of {get(path)} responses cannot be drawn. Set at most {path}, or raise that."
    elif get("eval.metric") == "cons@k":
        yield from _votes(get, math.comb(get(path), get(k)))
    yield from _responses_differ(path, get)


def _votes(get: Get, num_choices: int) -> Iterator[str]:
    name, those = get("data.env_name"), [each for each, spec in ENVIRONMENTS.items() if spec.finds_answers]
    if name not in those:
        yield (
            f"eval.metric: cons@k needs an environment that finds answers, and {name} says no more than what is right. "
            f"Set pass@k, or data.env_name to {' or '.join(those)}."
        )
    if num_choices > MAX_CHOICES:
        yield (
            f"eval.k_value: cons@k votes in each choice of {get('eval.k_value')} out of "
            f"{get('eval.num_tests_per_prompt')} responses, of which there are more than {MAX_CHOICES}. Set another "
            "k_value, or fewer responses."
        )


def _responses_of_a_validation(get: Get) -> Iterator[str]:
    if algorithm_has("val_num_generations_per_prompt", get):
        yield from _responses_differ(f"{get('algorithm')}.val_num_generations_per_prompt", get)


def _responses_differ(path: str, get: Get) -> Iterator[str]:
    temperature = "policy.generation.val_temperature"
    if get(path) > 1 and get(temperature) == 0:
        yield f"{path}: {get(path)} responses would all be the same one at {temperature} 0. Raise that, or set 1."


def _end_by_the_clock(get: Get) -> Iterator[str]:
    path = "checkpointing.checkpoint_must_save_by"
    if (text := get(path)) is None:
        return
    try:
        parse_duration(text)
    except ConfigError as error:
        yield f"{path}: {error}"
    if not get("checkpointing.enabled"):
        yield f"{path}: has no effect while checkpointing.enabled is false. Set that to true, or this to null."


def _teacher(get: Get) -> Iterator[str]:
    if algorithm_spec(get).needs_teacher and get("teacher.model_name") is None:
        yield "teacher.model_name: missing value. Give one: teacher.model_name=..."


def data_sets(get: Get) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Path and section of each data set that has a file or a folder."""
    for split in SPLITS:
        sections = {split: get(split)}
        sections |= {f"{split}.further.{number}": each for number, each in enumerate(get(f"{split}.further"))}
        yield from ((name, section) for name, section in sections.items() if section["path"] is not None)


def _answers_of_pairs(get: Get) -> Iterator[str]:
    for name, section in data_sets(get) if algorithm_spec(get).learns_from == "pairs" else ():
        if section["output_key"] is not None:
            yield f"{name}.output_key: pairs have two answers, chosen and rejected. Set it to null."


def _data_paths(get: Get) -> Iterator[str]:
    spec, algorithm = algorithm_spec(get), get("algorithm")
    train, validation = (get(f"{split}.path") for split in SPLITS)
    if spec.generates and takes_problems(get):
        of_files = " or ".join(
            name
            for name, other in ENVIRONMENTS.items()
            if other.problems == "file" and (spec.takes_led_episodes or not other.leads_episodes)
        )
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
    elif train is not None and validation is None and _takes_from_training(get):
        return
    elif (train is None) != (validation is None) and validates(get):
        there, missing = SPLITS if validation is None else reversed(SPLITS)
        yield (
            f"{missing}.path: missing value, while {there}.path is given. Give one, or turn validation off: "
            f"{algorithm}.val_period=0 {algorithm}.val_at_start=false {algorithm}.val_at_end=false"
        )


def _split_sizes(get: Get) -> dict[str, float]:
    """By their keys."""
    further = enumerate(get("data.train.further"))
    paths = {f"data.train.further.{number}": each["split_validation_size"] for number, each in further}
    sizes = {"data.train": get("data.train.split_validation_size")} | paths
    return {f"{path}.split_validation_size": size for path, size in sizes.items()}


def _takes_from_training(get: Get) -> bool:
    return any(_split_sizes(get).values())


def _parts_of_records(get: Get) -> Iterator[str]:
    for path, size in _split_sizes(get).items():
        if size > 1 and size != int(size):
            yield f"{path}: {size} is neither a share below 1 nor a number of records. Set {int(size)}, or a share."


def validates(get: Get) -> bool:
    """Whether the run measures anything but training."""
    algorithm = get("algorithm")
    return any(get(f"{algorithm}.{key}") for key in ("val_period", "val_at_start", "val_at_end"))


def _metric(get: Get) -> Iterator[str]:
    metric, algorithm = get("checkpointing.metric_name"), get("algorithm")
    allowed = algorithm_spec(get).metrics
    if metric is None:
        return
    if metric not in allowed:
        yield f"checkpointing.metric_name: {algorithm} has no {metric}. Allowed: {', '.join(allowed)}."
    elif metric.endswith(":loss") == get("checkpointing.higher_is_better"):
        wanted = str(not metric.endswith(":loss")).lower()
        yield f"checkpointing.higher_is_better: keeps the worst checkpoints by {metric}. Set it to {wanted}."


def _rewards_as_they_are(get: Get) -> Iterator[str]:
    name = get("algorithm")
    if algorithm_has("adv_estimator", get) and get(f"{name}.adv_estimator.name") == "gdpo":
        for key in ("reward_shaping", "reward_scaling"):
            if get(f"{name}.{key}.enabled"):
                yield (
                    f"{name}.{key}.enabled: true has no effect with {name}.adv_estimator.name gdpo, which compares "
                    "each reward as it is."
                )


TASK_WARNINGS: tuple[Rule, ...] = (_lengths, _rewards_as_they_are)
TASK_RULES: tuple[Rule, ...] = (
    _prompt_template,
    _generation_workers,
    _task,
    _task_params,
    function_path,
    _scorer_limits,
    *(partial(_thinking_tags, section) for section in ("env.math", "env.code_tests")),
    _parts_of_records,
    _samples_per_step,
    _groups,
    _turns_fit,
    _on_policy_ratio,
    _prompt_files,
    _batch_multiplier,
    _overlong_buffer,
    _sequence_ratios,
    _no_clip,
    _weights_of_losses,
    _reinforce,
    _several_rewards,
    _kl_in_reward,
    _intervals,
    _end_by_a_metric,
    _end_by_the_clock,
    _profiled_steps,
    _responses_of_an_evaluation,
    _responses_of_a_validation,
    _teacher,
    _data_paths,
    _answers_of_pairs,
    _metric,
)
