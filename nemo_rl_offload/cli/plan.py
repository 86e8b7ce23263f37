"""`nemo-rl-offload plan`: from a configuration to a job of the planner, and from its plan to tables and files."""

import argparse
from collections.abc import Sequence

from nemo_rl_offload.cli.layouts import advise
from nemo_rl_offload.cli.plan_files import changed_values, check_targets, given_words, uncollected
from nemo_rl_offload.cli.planned_job import read_options, say_what_auto_is, say_what_graphs_hold
from nemo_rl_offload.cli.show import show
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.planner.plan import JobPlan, asks_for_layouts, make_plan, with_advice
from nemo_rl_offload.planner.report.data import plan_data
from nemo_rl_offload.planner.report.html import plan_html
from nemo_rl_offload.planner.report.overlay import plan_overlay
from nemo_rl_offload.planner.report.tables import plan_tables
from nemo_rl_offload.runs.output import write_text


def plan(options: argparse.Namespace, overrides: Sequence[str]) -> JobPlan:
    """Plan, write what is asked for, and print. Raises ConfigError, and ResourceError where a file cannot be written
    after all."""
    loaded = read_recipe(options.config, overrides)
    say_what_auto_is(options, loaded)
    say_what_graphs_hold(options, loaded)
    job = read_options(options, loaded)
    check_targets(options)
    with uncollected():
        found = make_plan(job)
        if asks_for_layouts(found):
            found = with_advice(found, advise(options, overrides, loaded, 1))
    if options.html is not None:
        write_text(options.html, plan_html(found))
    if options.write is not None:
        changed = changed_values(loaded, options.config, overrides)
        write_text(
            options.write, plan_overlay(found, options.config, options.write, given_words(options, overrides), changed)
        )
    show(options.format, lambda: plan_data(found), lambda width: plan_tables(found, width))
    return found
