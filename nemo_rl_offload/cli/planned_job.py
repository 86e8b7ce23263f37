"""What `nemo-rl-offload plan` reads: a configuration on the command line as a job of the planner."""

import argparse
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.loader import resolve_model_path
from nemo_rl_offload.config.rules.parallel import training_and_generating
from nemo_rl_offload.config.sources import LoadedConfig
from nemo_rl_offload.config.validation import check_to_plan
from nemo_rl_offload.errors import ConfigError, all_or_none
from nemo_rl_offload.planner.cost.experts import Skew, recorded_skew
from nemo_rl_offload.planner.cost.memory import allowance_bytes
from nemo_rl_offload.planner.job import Job, Passes, read_job
from nemo_rl_offload.runs.run_directory import SUMMARY_FILE
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.devices import Device, find_device
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.units import parse_bytes


def read_options(options: argparse.Namespace, loaded: LoadedConfig) -> Job:
    """The configuration on the command line as the planner sees it. Raises one ConfigError with all problems."""
    config, per_node = loaded.values, options.gpus_per_node
    if per_node is not None and isinstance(config.get("cluster"), Mapping):
        config = {**config, "cluster": {**config["cluster"], "gpus_per_node": per_node}}
    device, skew, memory_bytes, _ = all_or_none(
        partial(find_device, options.gpu),
        partial(_skew, options),
        partial(_given_bytes, options.memory),
        partial(_check, config, options, loaded),
    )
    policy, cluster, algorithm = config["policy"], config["cluster"], ALGORITHMS[config["algorithm"]]
    if cluster["gpus_per_node"] != "auto":
        per_node = cluster["gpus_per_node"]
    per_node = device.devices_per_node if per_node is None else per_node
    offload = policy["megatron_cfg"]["activation_offload"]
    host_budget, num_mtp_layers = offload["host_memory_budget"], policy["megatron_cfg"]["mtp_num_layers"]
    shape = _shape("policy.model_name", policy["model_name"], num_mtp_layers)
    if skew is not None and shape.experts is None:
        given = "--routing-skew" if options.recorded_run is None else "--recorded-run"
        raise ConfigError(f"{given}: {policy['model_name']} has no experts whose tokens could be uneven. Leave it out.")
    return read_job(
        policy,
        shape,
        device,
        _num_training(config, per_node),
        skew=skew,
        memory_bytes=_memory_bytes(memory_bytes, offload["gpu_memory_budget"], device),
        host_budget=parse_bytes(host_budget) if isinstance(host_budget, str) else float(host_budget),
        reference_on_host=algorithm.copies_reference(config),
        rows_per_sample=algorithm.rows_per_sample,
        teacher=_shape("teacher.model_name", config["teacher"]["model_name"], num_mtp_layers)
        if algorithm.needs_teacher
        else None,
        teacher_element_bytes=4 if (config["teacher"]["precision"] or policy["precision"]) == "float32" else 2,
        ranks_per_node=per_node,
        passes=_passes(config),
    )


def say_what_auto_is(options: argparse.Namespace, loaded: LoadedConfig) -> None:
    """Tell how many GPUs a node is taken to have, where the configuration leaves that to the machine it runs on."""
    cluster = loaded.values.get("cluster")
    is_auto = isinstance(cluster, Mapping) and cluster.get("gpus_per_node") == "auto"
    if options.gpus_per_node is None and is_auto and not loaded.problems:
        with contextlib.suppress(ConfigError):  # which is told with the others
            device = find_device(options.gpu)
            print(
                f"note: cluster.gpus_per_node is auto: a node is taken to have {device.devices_per_node}, as those of "
                f"{device.name} have. --gpus-per-node N says otherwise.",
                file=sys.stderr,
            )


def say_what_graphs_hold(options: argparse.Namespace, loaded: LoadedConfig) -> None:
    """Tell what a plan does not count of CUDA graphs. Raises ConfigError where it is to write what it chooses, for it
    chooses as if nothing was captured."""
    if loaded.problems or loaded.values["policy"]["megatron_cfg"]["cuda_graph_impl"] != "transformer_engine":
        return
    key = "policy.megatron_cfg.cuda_graph_impl"
    if options.write is not None:
        raise ConfigError(
            f"--write: what a plan offloads or recomputes may be captured by {key}, which it knows nothing of. Plan "
            f"with {key}=none, or leave out --write."
        )
    print(
        f"note: {key}: each captured shape of microbatches, 2 at most, keeps what its captured parts save. That of one "
        "shape is counted, while it trains; not that it stays in other phases, nor the host's time that graphs spare. "
        f"What is offloaded or recomputed is chosen as if nothing was captured: it may need {key}=none.",
        file=sys.stderr,
    )


def _passes(config: Mapping[str, Any]) -> Passes:
    """What a step does beside training, on the GPUs that train."""
    algorithm, policy = ALGORITHMS[config["algorithm"]], config["policy"]
    generation, longest = policy["generation"], policy["max_total_sequence_length"]
    found = Passes()
    if algorithm.generates and generation["colocated"]["enabled"]:
        if generation["backend"] == "vllm":
            found = replace(found, engine_share=generation["vllm_cfg"]["gpu_memory_utilization"])
        else:
            found = replace(
                found,
                generation_rows=policy["generation_batch_size"],
                generation_length=longest,
                prompt_length=min(config["data"]["max_input_seq_length"], longest),
            )
    if algorithm.has_logprob_passes:
        sections = (policy["dynamic_batching"], policy["sequence_packing"])
        tokens = next((section["logprob_mb_tokens"] for section in sections if section["enabled"]), None)
        given = config["teacher"]["logprob_batch_size"]
        rows = (policy["logprob_batch_size"], given or policy["logprob_batch_size"])
        own, teachers = (max(tokens or num_rows * longest, longest) for num_rows in rows)
        found = replace(found, logprob_tokens=own, teacher_tokens=teachers, teachers_own_rows=given is not None)
    return found


def _check(config: dict[str, Any], options: argparse.Namespace, loaded: LoadedConfig) -> None:
    if options.gpus_per_node is not None and options.gpus_per_node < 1:
        raise ConfigError(f"--gpus-per-node {options.gpus_per_node}: give a number from 1 on.")
    check_to_plan(replace(loaded, values=config), str(options.config))


def _shape(key: str, name: str, mtp_num_layers: int | None) -> ModelShape:
    folder = None
    with contextlib.suppress(ConfigError):  # then the catalogue is asked, whose message names both
        folder = resolve_model_path(name)
    try:
        return load_model_shape(name, folder, mtp_num_layers)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _num_training(config: Mapping[str, Any], per_node: int) -> int:
    """Workers that train."""
    colocated, num_nodes = config["policy"]["generation"]["colocated"], config["cluster"]["num_nodes"]
    if not ALGORITHMS[config["algorithm"]].generates:
        colocated = {"enabled": True}
    training, generating = training_and_generating(colocated, num_nodes, per_node)
    if training < 1:
        raise ConfigError(
            f"policy.generation.colocated.resources: {generating} workers of {training + generating} leave none to "
            "train. Lower that, or give more with --gpus-per-node."
        )
    return training


def _given_bytes(size: str | None) -> int | None:
    try:
        return None if size is None else parse_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"--memory: {error}") from error


def _memory_bytes(given_bytes: int | None, allocator_budget: str | None, device: Device) -> int:
    """Device memory for a plan; 0: all of it. `auto` keeps what torch's allocator hands out within its budget, beside
    which the allowances stand."""
    if given_bytes is not None:
        return given_bytes
    if allocator_budget is None:
        return 0
    budget_bytes = parse_bytes(allocator_budget)
    if budget_bytes > device.memory_bytes:
        return budget_bytes
    return min(device.memory_bytes, budget_bytes + sum(allowance_bytes(device).values()))


def _skew(options: argparse.Namespace) -> Skew | None:
    if options.recorded_run is not None:
        return recorded_skew(options.recorded_run / SUMMARY_FILE)
    if options.routing_skew is None:
        return None
    if not 1 <= options.routing_skew < float("inf"):
        raise ConfigError(
            f"--routing-skew {options.routing_skew:g}: the fullest rank has at least the average. Give 1.3."
        )
    return Skew(options.routing_skew, options.routing_skew)
