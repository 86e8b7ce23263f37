"""Rules about batches, lengths, tasks: everything outside `policy.megatron_cfg`."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from nemo_rl_offload.config.rule import Get, Rule
from nemo_rl_offload.errors import nearest


def _micro_batches(get: Get) -> Iterator[str]:
    whole, micro = get("policy.train_global_batch_size"), get("policy.train_micro_batch_size")
    if whole % micro:
        yield (
            f"policy.train_global_batch_size: {whole} is not a multiple of train_micro_batch_size {micro}. "
            "Change one of them."
        )


def _samples_per_step(get: Get) -> Iterator[str]:
    whole = get("policy.train_global_batch_size")
    prompts, generations = get("grpo.num_prompts_per_step"), get("grpo.num_generations_per_prompt")
    if (prompts * generations) % whole:
        yield (
            f"policy.train_global_batch_size: {whole} does not divide the samples of a step, "
            f"grpo.num_prompts_per_step x num_generations_per_prompt = {prompts} x {generations}. "
            f"Set {prompts * generations} for one update per step."
        )


def _leave_one_out(get: Get) -> Iterator[str]:
    if get("grpo.use_leave_one_out_baseline") and get("grpo.num_generations_per_prompt") < 2:
        yield (
            "grpo.num_generations_per_prompt: must be at least 2 while use_leave_one_out_baseline is true. "
            "Raise it, or turn the baseline off."
        )


def _lengths(get: Get) -> Iterator[str]:
    prompt, response = get("data.max_input_seq_length"), get("policy.generation.max_new_tokens")
    total = get("policy.max_total_sequence_length")
    if prompt + response > total:
        yield (
            f"policy.max_total_sequence_length: {total} is less than data.max_input_seq_length {prompt} + "
            f"policy.generation.max_new_tokens {response}. Set at least {prompt + response}."
        )


def _prompt_template(get: Get) -> Iterator[str]:
    template = get("data.prompt_template")
    if template is not None and "{question}" not in template:
        yield "data.prompt_template: has no place for the question. Put {question} into it."


def _task(get: Get) -> Iterator[str]:
    task = get("env.reasoning_gym.task")
    names = task_names()
    if task not in names:
        hint = nearest(task, names) or f" Some of them: {', '.join(sorted(names)[:5])}."
        yield f"env.reasoning_gym.task: '{task}' is none of reasoning-gym's {len(names)} tasks.{hint}"


@cache
def task_names() -> set[str]:
    """Return the names of reasoning-gym's data sets, read from its sources: importing it takes seconds."""
    package = find_spec("reasoning_gym")
    assert package is not None
    assert package.submodule_search_locations
    declared = re.compile(r'^(?:DATASET_NAME\s*=|register_dataset\()\s*"(\w+)"', re.MULTILINE)
    sources = Path(package.submodule_search_locations[0]).rglob("*.py")
    return {name for source in sources for name in declared.findall(source.read_text(encoding="utf-8"))}


RUN_RULES: tuple[Rule, ...] = (
    _micro_batches,
    _samples_per_step,
    _leave_one_out,
    _lengths,
    _prompt_template,
    _task,
)
