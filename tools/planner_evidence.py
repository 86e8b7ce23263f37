"""What the planner predicts for published runs: `python tools/planner_evidence.py` writes it to the docs.

`docs/planner.md` keeps its hand-written part, down to the mark.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_offload.offload.solver import Action
from nemo_rl_offload.planner.cost.flops import layer_costs
from nemo_rl_offload.planner.cost.parameters import model_parameters
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.simulate.pipeline_schedule import live_passes, pipeline_schedule
from nemo_rl_offload.planner.simulate.simulated_step import SimulatedStep, run_stages, run_whole_modules
from nemo_rl_offload.planner.simulate.stages import build_stages
from nemo_rl_offload.specs.catalogue import CATALOGUE, load_model_shape
from nemo_rl_offload.specs.devices import Device, find_device
from nemo_rl_offload.specs.model_shape import MOE_LAYER
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

MARK = "<!-- Below: written by `python tools/planner_evidence.py`. -->\n"
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
MIB = 1 << 20

# Bytes of the weights in `model.safetensors.index.json` of each model's folder on the hub, bfloat16, where they are
# (Qwen, Llama); else the model's own card: DeepSeek-V3's README_WEIGHTS.md and the gpt-oss model card
# (arXiv 2508.10925, table 1).
PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-1.5B": 3_087_428_608 / 2,
    "Qwen/Qwen2.5-7B": 15_231_233_024 / 2,
    "Qwen/Qwen2.5-32B": 65_527_752_704 / 2,
    "Qwen/Qwen3-8B": 16_381_470_720 / 2,
    "Qwen/Qwen3-30B-A3B": 61_064_245_248 / 2,
    "Qwen/Qwen3-235B-A22B": 470_187_269_120 / 2,
    "meta-llama/Llama-3.1-8B": 16_060_522_496 / 2,
    "meta-llama/Llama-3.1-70B": 141_107_412_992 / 2,
    "deepseek-ai/DeepSeek-V3": 671e9,
    "openai/gpt-oss-120b": 116.83e9,
}

DEEPSEEK_MODULES = ("attn_norm", "mlp_norm", "expert_fc1", "moe_act")
DEEPSEEK_TFLOPS, DEEPSEEK_TFLOPS_OFFLOADED = 321, 315
DEEPSEEK_SAVED_MIB = 74306 - 61046


@dataclass(frozen=True)
class Row:
    """A published figure and the planner's."""

    source: str
    figure: str
    published: str
    predicted: str
    note: str


@dataclass(frozen=True)
class DeepSeekRun:
    """Megatron-LM's PR 1913 on H100, predicted. Memory is that of the first stage."""

    layer_bytes: int
    """What the four modules save in a layer for one microbatch."""
    saved_bytes: int
    """Offloaded bytes that are alive at the peak."""
    saved_with_copies_bytes: int
    """Fall of the simulated peak, where copies on their way still take memory."""
    loss_percent: float


def deepseek_run() -> DeepSeekRun:
    """Predict PR 1913's H100 row: 14 layers with experts over four stages of 4, 4, 4 and 2."""
    device = _calibrated(find_device("h100-80gb"))
    job = replace(_deepseek_job(device), offload_modules=DEEPSEEK_MODULES)
    kept, offloaded = _kept(job), run_whole_modules(job, DEEPSEEK_MODULES)
    stage = offloaded.stages[0]
    records = [record for record in stage.records() if record.can_offload]
    return DeepSeekRun(
        layer_bytes=sum(record.saved_bytes for record in records) // len(stage.layers[0]),
        saved_bytes=sum(record.saved_bytes * record.live_at_peak for record in records),
        saved_with_copies_bytes=kept.peak_bytes(0) - offloaded.peak_bytes(0),
        loss_percent=100 * (1 - kept.step_ms / offloaded.step_ms),
    )


def _deepseek_job(device: Device) -> Job:
    """Batch 512 over the data-parallel ranks; how many there were is not published: 32, two copies of each expert."""
    whole = load_model_shape("deepseek-ai/DeepSeek-V3", None)
    shape = replace(whole, num_layers=14, layers_with_experts=(True,) * 14, num_mtp_layers=0)
    layout = ParallelLayout(world=128, pipeline=4, expert=16, num_layers_first=4, num_layers_last=2)
    return Job(shape, layout, device, sequence=4096, micro_batch=1, num_microbatches=512 // layout.data)


def _calibrated(device: Device) -> Device:
    """Set the share of the peak rate so that the run without offloading is as fast as published."""
    for _ in range(8):
        job = _deepseek_job(device)
        forward = 14 * sum(work.forward_flops for work in layer_costs(job.context, MOE_LAYER))
        forward += 2.0 * job.context.tokens.count * job.shape.hidden_size * job.shape.vocab_size
        seconds = _kept(job).step_ms / 1e3
        tflops = 3 * forward * job.num_microbatches / job.layout.pipeline / seconds / 1e12
        device = replace(device, achieved=device.achieved * DEEPSEEK_TFLOPS / tflops)
    return device


def _kept(job: Job) -> SimulatedStep:
    stages = build_stages(job, ())
    return run_stages(job, stages, [[Action.KEEP] * len(stage.records()) for stage in stages])


def interleaved_groups() -> tuple[int, int]:
    """Groups that PR 1752's two stages hold on the host at their peaks: two per live chunk, but for the last group."""
    first, last = (max(live_passes(passes)) for passes in pipeline_schedule(2, 8, 2))
    return 2 * first - 1, 2 * last - 1


def rows() -> Iterator[Row]:
    """All rows of the table."""
    run, source = deepseek_run(), "Megatron-LM PR 1913, H100"
    published = f"{DEEPSEEK_SAVED_MIB} MiB"
    saved, with_copies = run.saved_bytes / MIB, run.saved_with_copies_bytes / MIB
    yield Row(
        source,
        "memory saved",
        published,
        f"{saved:.0f} MiB ({100 * (saved / DEEPSEEK_SAVED_MIB - 1):+.1f} %)",
        f"{run.layer_bytes / 1e6:.1f} MB a layer and microbatch, 4 layers, 4 live microbatches",
    )
    yield Row(
        source,
        "the same with copies on their way",
        published,
        f"{with_copies:.0f} MiB ({100 * (with_copies / DEEPSEEK_SAVED_MIB - 1):+.1f} %)",
        "what `plan` subtracts: up to 1 GiB leaving, and what backward needs next",
    )
    loss = 100 * (1 - DEEPSEEK_TFLOPS_OFFLOADED / DEEPSEEK_TFLOPS)
    note = f"rate fitted to the run without offloading ({DEEPSEEK_TFLOPS} TFLOP/s)"
    yield Row(source, "throughput lost", f"{loss:.1f} %", f"{run.loss_percent:.1f} %", note)
    first, last = interleaved_groups()
    yield Row(
        "Megatron-LM PR 1752, PP2 VPP2",
        "offloaded by the two stages",
        "1440 MB and 800 MB",
        f"{160 * first} MB and {160 * last} MB",
        f"{first} and {last} groups from the schedule; 160 MB a group is fitted, no shapes were published",
    )
    for name in CATALOGUE:
        count, known = model_parameters(load_model_shape(name, None)), PUBLISHED_PARAMETERS[name]
        error = f"{100 * (count / known - 1):+.2f} %"
        yield Row(name, "parameters", f"{known / 1e9:.3f} B", f"{count / 1e9:.3f} B ({error})", "")


def document() -> str:
    """Return `docs/planner.md` with its table made anew."""
    by_hand, mark, _ = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{DOCUMENT} has lost the line {MARK}"
    lines = [f"| {row.source} | {row.figure} | {row.published} | {row.predicted} | {row.note} |\n" for row in rows()]
    head = "\n| source | figure | published | predicted | note |\n|---|---|---|---|---|\n"
    return by_hand + MARK + head + "".join(lines)


def main() -> int:
    """Write the document; returns 0."""
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
