"""A layout as configuration keys, and as overrides to paste."""

import shlex
from collections.abc import Iterator, Mapping

from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.specs.parallel_layout import FIRST, KEYS, LAST, ParallelLayout
from nemo_rl_offload.specs.pipeline_layout import KEY as STAGES
from nemo_rl_offload.specs.pipeline_layout import SECTION


def layout_keys(layout: ParallelLayout) -> dict[str, object]:
    """Paths and values of all that a layout says."""
    found: dict[str, object] = {f"{SECTION}.{key}": getattr(layout, name) for name, key in KEYS.items()}
    found |= {
        f"{SECTION}.{KEYS['virtual']}": layout.virtual if layout.virtual > 1 else None,
        f"{SECTION}.sequence_parallel": layout.sequence_parallel,
        f"{SECTION}.{FIRST}": layout.num_layers_first,
        f"{SECTION}.{LAST}": layout.num_layers_last,
        f"{SECTION}.{STAGES}": layout.stages,
    }
    if layout.virtual > 1 and layout.pipeline == 2:  # batched messages would give wrong gradients
        found |= {f"{SECTION}.batch_p2p_comm": False, f"{SECTION}.overlap_p2p_comm": True}
    return found


def job_keys(job: Job) -> dict[str, object]:
    """Likewise of a job's layout, of its microbatches and of the optimizer's share on the host."""
    found = layout_keys(job.layout)
    if job.micro_batch_tokens is None:
        found["policy.train_micro_batch_size"] = job.micro_batch // job.rows_per_sample
    else:
        section = "sequence_packing" if job.is_packed else "dynamic_batching"
        found[f"policy.{section}.train_mb_tokens"] = job.micro_batch_tokens
    if share := job.optimizer.share_on_host:
        path = f"{SECTION}.optimizer"
        found |= {f"{path}.optimizer_cpu_offload": True, f"{path}.optimizer_offload_fraction": share}
    return found


def paths_of(keys: Mapping[str, object], path: str) -> Iterator[tuple[str, object]]:
    """The values of a section and of those in it, with their paths below `path`."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from paths_of(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def as_override(path: str, value: object) -> str:
    """`KEY=VALUE` in Hydra's grammar."""
    return f"{path}={_in_hydra(value)}"


def to_paste(overrides: Mapping[str, object]) -> str:
    """Overrides for a shell, by their paths."""
    return " ".join(shlex.quote(as_override(path, value)) for path, value in overrides.items())


def _in_hydra(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_in_hydra, value))}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not value.replace("_", "").isalnum():
        return f'"{value}"'
    return str(value)
