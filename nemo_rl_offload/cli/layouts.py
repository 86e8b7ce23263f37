"""`nemo-rl-offload plan --layouts`, and the layouts that `plan` advises where the given one has no room."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl_offload.cli.plan_files import changed_values, check_targets, given_words, uncollected
from nemo_rl_offload.cli.planned_job import read_options, say_what_auto_is
from nemo_rl_offload.cli.show import show
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.sources import LoadedConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.job import Job, longest_row, tokens_of_a_microbatch
from nemo_rl_offload.planner.report.layouts import layouts_data, layouts_overlay, layouts_text
from nemo_rl_offload.planner.search.choice import as_configured
from nemo_rl_offload.planner.search.layout_keys import as_override, layout_keys
from nemo_rl_offload.planner.search.layout_search import FoundLayout, LayoutAdvice, find_layouts
from nemo_rl_offload.planner.search.layouts import LayoutTask
from nemo_rl_offload.planner.search.to_config import Trials
from nemo_rl_offload.runs.output import write_text
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

NODES = "cluster.num_nodes"
_FACTORS = (1, 2, 4, 8, 16)
"""Of the machines, for which layouts are searched until some are found."""


def plan_layouts(options: argparse.Namespace, overrides: Sequence[str]) -> LayoutAdvice:
    """Search layouts, write the best if that is asked for, and print. Raises ConfigError as `plan` does."""
    if options.html is not None:
        raise ConfigError("--html: not with --layouts. Plan the layout that you take, with --html.")
    check_targets(options)
    given = read_recipe(options.config, overrides)
    say_what_auto_is(options, given)
    with uncollected():
        advice = replace(advise(options, overrides, given, options.layouts), configured=_configured(options, given))
    if options.write is not None and advice.found:
        changes = [as_override(path, value) for path, value in advice.found[0].keys.items()]
        changes = [*overrides, *changes]
        changed = changed_values(read_recipe(options.config, changes), options.config, changes)
        write_text(
            options.write,
            layouts_overlay(advice, options.config, options.write, given_words(options, overrides), changed),
        )
    show(options.format, lambda: layouts_data(advice), lambda _width: layouts_text(advice))
    return advice


def _configured(options: argparse.Namespace, given: LoadedConfig) -> FoundLayout | None:
    """What the configuration has; None where it cannot be planned."""
    try:
        job = read_options(options, given)
    except ConfigError:
        return None
    trials = Trials(job)
    return FoundLayout(job, {}, as_configured(job, trials) or trials.try_modules(job.recompute, ()))


def advise(options: argparse.Namespace, overrides: Sequence[str], given: LoadedConfig, number: int) -> LayoutAdvice:
    """Layouts on the configured machines; where none fits, on twice as many, and so on.

    Raises ConfigError where the configuration cannot be planned in any layout.
    """
    first: LayoutAdvice | None = None
    for factor in _FACTORS:
        added = {NODES: factor * given.values["cluster"]["num_nodes"]} if factor > 1 else {}
        more = [as_override(path, value) for path, value in added.items()]
        try:
            task = _task(options, [*overrides, *more])
        except ConfigError:
            if first is None:
                raise
            break
        found, blocked = find_layouts(task, number)
        first = first or LayoutAdvice((), task.job.device, task.job.budget_bytes, task.job.layout.world, 0, blocked)
        first = replace(first, most_world=task.job.layout.world)
        if found:
            shown = [replace(each, keys=_changed({**added, **each.keys}, given.values)) for each in found]
            return replace(first, found=tuple(shown))
    assert first is not None
    return first


def _changed(keys: Mapping[str, object], values: Mapping[str, Any]) -> dict[str, object]:
    """Those that are not configured so."""
    return {path: value for path, value in keys.items() if _value_at(values, path) != value}


def _value_at(values: Mapping[str, Any], path: str) -> object:
    node: Any = values
    for part in path.split("."):
        node = node[part]
    return node


def _task(options: argparse.Namespace, overrides: Sequence[str]) -> LayoutTask:
    loaded = read_recipe(options.config, overrides)

    def reread(keys: Mapping[str, object]) -> Job | None:
        changed = [as_override(path, value) for path, value in _changed(keys, loaded.values).items()]
        try:
            return read_options(options, read_recipe(options.config, [*overrides, *changed]))
        except ConfigError:
            return None

    job = _any_job(options, loaded, reread)
    policy = loaded.values["policy"]
    return LayoutTask(
        job,
        longest_row(policy),
        policy["train_global_batch_size"],
        policy["train_micro_batch_size"],
        tokens_of_a_microbatch(policy),
        reread,
    )


def _any_job(
    options: argparse.Namespace, loaded: LoadedConfig, reread: Callable[[Mapping[str, object]], Job | None]
) -> Job:
    """The configured job, or the same in the first layout in which it can be planned."""
    try:
        return read_options(options, loaded)
    except ConfigError:
        for layout in _simple_layouts():
            if (job := reread({**layout_keys(layout), "policy.train_micro_batch_size": 1})) is not None:
                return job
        raise


def _simple_layouts() -> Iterator[ParallelLayout]:
    for tensor in (8, 4, 2, 1):
        for pipeline in (1, 2, 4, 8):
            yield ParallelLayout(1, tensor, pipeline, sequence_parallel=tensor > 1)
