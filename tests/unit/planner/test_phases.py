"""Phases of a step: what they hold, what the host holds, and what is refused with the numbers."""

import re
from dataclasses import replace
from typing import Any

import pytest
from jobs import make_job

from nemo_rl_offload.planner.cost.memory import EIGHT_BIT_COPIES, Optimizer
from nemo_rl_offload.planner.cost.parameters import model_parameters
from nemo_rl_offload.planner.cost.storages import Numbers
from nemo_rl_offload.planner.job import Job, Passes
from nemo_rl_offload.planner.phases import GRADIENT_COPIES, LEAVING, Phase, PhasesOfStage, fullest, host_use, lacking
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.planner.report.data import plan_data
from nemo_rl_offload.planner.report.phases_svg import phases_svg
from nemo_rl_offload.planner.search.suggestions import NONE_TRIED
from nemo_rl_offload.planner.search.to_config import run_nothing
from nemo_rl_offload.planner.simulate.simulated_step import highest_peak
from nemo_rl_offload.specs.parallel_layout import ParallelLayout
from nemo_rl_offload.units import GIB

GRPO = Passes(generation_rows=32, generation_length=1024, prompt_length=256, logprob_tokens=4096)
ALONE = ParallelLayout(1)
ON_HOST = Optimizer(share_on_host=1.0)


def seven_billion(**changes: object) -> Job:
    """Qwen2.5-7B on one card, as the largest model that one trains."""
    job = make_job("Qwen/Qwen2.5-7B", layout=ALONE, num_microbatches=4, makes_logits=False, passes=GRPO)
    given: dict[str, Any] = {"optimizer": ON_HOST, "reference_on_host": True} | changes
    return replace(job, **given)


def phases_of(job: Job, rank: int = 0) -> dict[str, Phase]:
    return {phase.name: phase for phase in PhasesOfStage(job, run_nothing(job), rank).phases()}


def test_a_training_phase_is_the_simulated_peak() -> None:
    job = make_job("Qwen/Qwen3-8B", layout=ParallelLayout(8, pipeline=2), passes=GRPO)
    step = run_nothing(job)
    for rank in range(2):
        assert phases_of(job, rank)["training"].peak_bytes == step.peak_bytes(rank)


def test_each_algorithm_has_its_phases_in_the_order_of_a_step() -> None:
    sft = make_job("Qwen/Qwen2.5-1.5B")
    assert list(phases_of(sft)) == ["training", "optimizer step"]
    dpo = replace(sft, passes=Passes(logprob_tokens=4096), reference_on_host=True)
    assert list(phases_of(dpo))[:2] == ["log-probabilities", "reference log-probabilities"]
    grpo = replace(sft, passes=GRPO)
    assert list(phases_of(grpo)) == ["generation", "log-probabilities", "training", "optimizer step"]
    distilled = replace(grpo, teacher=sft.shape)
    assert list(phases_of(distilled))[1] == "teacher's logits"


@pytest.mark.parametrize("makes_logits", [False, True])
def test_a_teachers_pass_is_of_its_own_shape_and_rows(makes_logits: bool) -> None:
    """It was counted as one of the student's, at the student's rows: 30 GiB too little beside a teacher of 32 B."""
    student, teacher = (make_job(f"Qwen/{name}", layout=ALONE) for name in ("Qwen2.5-1.5B", "Qwen3-8B"))
    student, teacher = (replace(job, makes_logits=makes_logits) for job in (student, teacher))
    tokens = 8 * student.sequence
    passes = Passes(logprob_tokens=student.sequence, teacher_tokens=tokens)
    found = phases_of(replace(student, passes=passes, teacher=teacher.shape))["teacher's logits"].parts
    own = phases_of(replace(teacher, passes=Passes(logprob_tokens=tokens)))["log-probabilities"].parts
    assert found[student.head_name] == own[student.head_name]
    assert found["teacher"] == own["weights"]


@pytest.mark.parametrize(("is_packed", "rows_of_a_chunk"), [(False, 16), (True, 1)])
def test_chunks_of_log_probabilities_are_of_their_own_rows(is_packed: bool, rows_of_a_chunk: int) -> None:
    """They were of as many rows as training has at a time."""
    job = replace(make_job("Qwen/Qwen2.5-1.5B", layout=ALONE), makes_logits=True, logprob_chunk_size=256)
    job = replace(job, is_packed=is_packed, passes=Passes(logprob_tokens=16 * job.sequence))
    vocabulary, tokens = job.shape.vocab_size, 16 * job.sequence
    for micro_batch in (1, 4, 16):
        found = phases_of(replace(job, micro_batch=micro_batch))["log-probabilities"].parts["logits"]
        assert found == vocabulary * (tokens * 2 + 256 * rows_of_a_chunk * 8)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"teacher_element_bytes": 4}, "No smaller pass helps: divide the model over more ranks."),
        (
            {"passes": Passes(logprob_tokens=1 << 21, teacher_tokens=1 << 21, teachers_own_rows=True)},
            "Lower teacher.logprob_batch_size.",
        ),
        ({"passes": Passes(logprob_tokens=1 << 21, teacher_tokens=1 << 21)}, "Lower policy.logprob_batch_size."),
        ({"host_budget": 8 * GIB}, "the teacher's weights 15.3 GiB per rank, 7.3 GiB more than the 8.0 GiB of"),
    ],
)
def test_what_a_teacher_lacks_names_what_helps(changes: dict[str, Any], remedy: str) -> None:
    """Fewer rows were advised where the weights alone have no room, and the other model's key."""
    job = replace(make_job("Qwen/Qwen2.5-1.5B", layout=ALONE, makes_logits=False), frees_gradients=True)
    teacher = make_job("Qwen/Qwen3-32B" if "teacher_element_bytes" in changes else "Qwen/Qwen3-8B").shape
    passes = Passes(logprob_tokens=4096, teacher_tokens=4096)
    job = replace(job, teacher=teacher, **{"passes": passes, "host_budget": 200 * GIB, **changes})
    (line,) = lacking(job, run_nothing(job))
    assert remedy in line


def test_one_row_needs_no_logits() -> None:
    job = replace(make_job("Qwen/Qwen2.5-1.5B", layout=ALONE, makes_logits=True), sequence=1 << 17)
    job = replace(job, passes=Passes(logprob_tokens=job.sequence))
    lines = [line for line in lacking(job, run_nothing(job)) if line.startswith("log-probabilities")]
    assert lines[0].endswith("more than there is. Set policy.megatron_cfg.use_fused_linear_logprobs=true.")


def test_gradients_are_where_they_are_needed_alone() -> None:
    job = replace(make_job("Qwen/Qwen2.5-1.5B"), passes=GRPO, reference_on_host=True)
    kept, freed = phases_of(job), phases_of(replace(job, frees_gradients=True))
    for name, phase in kept.items():
        is_training = name in ("training", "optimizer step")
        assert ("gradients" in freed[name].parts) == is_training
        assert phase.peak_bytes - freed[name].peak_bytes == (0 if is_training else phase.parts["gradients"])


def test_copies_of_weights_in_eight_bits_are_freed_where_gradients_are() -> None:
    """Two bytes for each weight of the layers, which are the published count without embeddings."""
    job = replace(make_job("Qwen/Qwen2.5-1.5B", layout=ALONE), passes=GRPO)
    assert all(EIGHT_BIT_COPIES not in phase.parts for phase in phases_of(job).values())
    narrow = replace(job, numbers=Numbers(2, "blockwise"))
    kept, freed = phases_of(narrow), phases_of(replace(narrow, frees_gradients=True))
    assert kept["training"].parts[EIGHT_BIT_COPIES] == pytest.approx(2 * 1.31e9, rel=0.01)
    assert EIGHT_BIT_COPIES in kept["generation"].parts
    assert EIGHT_BIT_COPIES not in freed["generation"].parts
    assert EIGHT_BIT_COPIES in freed["log-probabilities"].parts


def test_a_teachers_weights_have_copies_in_eight_bits_too() -> None:
    job = replace(make_job("Qwen/Qwen2.5-1.5B", layout=ALONE), passes=GRPO, numbers=Numbers(2, "blockwise"))
    found = phases_of(replace(job, teacher=job.shape))["teacher's logits"].parts
    assert found["teacher's copies in 8 bits"] == found[EIGHT_BIT_COPIES]


def test_layers_that_stay_wide_keep_their_inputs_so() -> None:
    numbers = Numbers(2, "blockwise"), Numbers(2, "blockwise", has_wide_layers=True), Numbers(2)
    assert [each.linear_input_bytes(1280) for each in numbers] == [1320, 2560, 2560]


def test_host_bytes_are_those_of_the_published_count() -> None:
    """7.6 G parameters: 12 bytes each of state and main weights, 2 of the reference."""
    job = seven_billion()
    count = model_parameters(job.shape)
    assert count == pytest.approx(7.616e9, rel=1e-3)
    host = host_use(job, run_nothing(job))
    assert host.parts["optimizer"] == pytest.approx(12 * count, rel=1e-3)
    assert host.parts["reference weights"] == pytest.approx(2 * count, rel=1e-3)
    assert host.pinned_bytes / GIB == pytest.approx(99.3, rel=0.01)
    moves = {move.what: move for move in PhasesOfStage(job, run_nothing(job), 0).moves()}
    assert moves["optimizer through the device"].ms == pytest.approx(12 * count / 55e6, rel=1e-3)
    assert moves["reference weights in and out"].ms == pytest.approx(4 * count / 55e6, rel=1e-3)


def test_what_has_no_room_beside_vllm_leaves_the_optimizer_first() -> None:
    """1.5 G parameters: 18 GiB of state and main weights, 3 GiB of weights."""
    job = make_job("Qwen/Qwen2.5-1.5B", layout=ALONE, makes_logits=False, host_budget=64 * GIB, frees_gradients=True)
    count = model_parameters(job.shape)
    for share, expected in ((0.5, {}), (0.75, {"optimizer": 12}), (0.95, {"optimizer": 12, "weights": 2})):
        changed = replace(job, passes=Passes(engine_share=share))
        step = run_nothing(changed)
        stage = PhasesOfStage(changed, step, 0)
        assert {name: round(size / count) for name, size in stage.leaving.items()} == expected
        assert stage.phases()[0].peak_bytes <= changed.budget_bytes
        gone = sum(stage.leaving.values())
        assert host_use(changed, step).parts.get(LEAVING, 0) == gone
        assert [(move.out_bytes, move.in_bytes) for move in stage.moves()] == ([(gone, gone)] if gone else [])
        assert all(move.ms == pytest.approx(2 * gone / 55e6, rel=1e-3) for move in stage.moves())
    assert any("host memory" in text for text in lacking(replace(changed, host_budget=8 * GIB), step))


@pytest.mark.parametrize("engine_share", [0.0, 0.25, 0.75])
def test_an_optimizer_that_leaves_for_log_probabilities_crosses_the_link_once(engine_share: float) -> None:
    job = make_job("Qwen/Qwen2.5-1.5B", layout=ALONE, makes_logits=False, host_budget=64 * GIB)
    job = replace(job, passes=Passes(engine_share=engine_share, logprob_tokens=4096))
    stays, leaves = (replace(job, optimizer_leaves_for_logprob=each) for each in (False, True))
    phase = phases_of(leaves)["log-probabilities"]
    assert not {"optimizer", "gradients"} & set(phase.parts)
    assert ("optimizer" in phases_of(stays)["log-probabilities"].parts) == (engine_share < 0.5)
    assert not engine_share or not {"optimizer", "gradients"} & set(phases_of(leaves)["generation"].parts)
    step = run_nothing(leaves)
    stage = PhasesOfStage(leaves, step, 0)
    size = step.stages[0].static_bytes["optimizer"]
    assert host_use(leaves, step).parts[LEAVING] == size
    when = "generation" if engine_share else "log-probabilities"
    assert [(move.phase, move.out_bytes, move.in_bytes) for move in stage.moves()] == [(when, size, size)]
    tight = replace(leaves, host_budget=8 * GIB)
    assert any("or leave out policy.offload_optimizer_for_logprob." in text for text in lacking(tight, step))
    sft = replace(leaves, passes=Passes())
    assert PhasesOfStage(sft, step, 0).leaving == {}


def test_ranks_share_the_optimizer_and_each_has_the_reference() -> None:
    job = seven_billion()
    shared = replace(job, layout=ParallelLayout(8))
    alone, eighth = (host_use(each, run_nothing(each)) for each in (job, shared))
    assert eighth.parts["optimizer"] == pytest.approx(alone.parts["optimizer"] / 8, rel=1e-6)
    assert eighth.parts["reference weights"] == alone.parts["reference weights"]
    assert eighth.used_node_bytes == 8 * eighth.pinned_bytes


def test_what_waits_on_the_host_leaves_activations_the_rest_of_the_budget() -> None:
    job = make_job("Qwen/Qwen3-8B", num_layers=10, micro_batch=2)
    job = replace(job, memory_bytes=highest_peak(make_plan(job).baseline) - 2 * GIB)
    activations = make_plan(job).chosen.host_bytes(0)
    assert activations > GIB
    reference = replace(job, reference_on_host=True)
    weights = host_use(reference, run_nothing(reference)).parts["reference weights"]
    tight = make_plan(replace(reference, host_budget=weights + activations // 2))
    assert 0 <= tight.chosen.host_bytes(0) <= activations // 2
    roomy = make_plan(replace(reference, host_budget=weights + activations))
    assert roomy.chosen.host_bytes(0) == activations


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        (
            {"host_budget": 64 * GIB},
            r"host memory: optimizer 85\.\d GiB, reference weights 14\.\d GiB per rank, 35\.\d GiB more than the 64\.0 "
            r"GiB of activation_offload\.host_memory_budget\. Raise that, or lower optimizer_offload_fraction\.",
        ),
        (
            {"host_budget": 10 * GIB, "optimizer": Optimizer()},
            r"host memory: reference weights 14\.\d GiB per rank, 4\.\d GiB more than the 10\.0 GiB of .* Raise that\.",
        ),
        ({"passes": Passes(engine_share=0.6)}, ""),
        (
            {"passes": Passes(engine_share=0.99)},
            r"generation on stage 0: .* more than there is\. .*gpu_memory_utilization may be 0\.\d+\.",
        ),
        (
            {"passes": replace(GRPO, generation_rows=4096)},
            r"generation on stage 0: .* Lower policy\.generation_batch_size\.",
        ),
        (
            {"passes": replace(GRPO, logprob_tokens=1 << 18), "makes_logits": True},
            r"log-probabilities on stage 0: .* Lower policy\.logprob_batch_size, or set policy.*logprobs=true\.",
        ),
        (
            {"passes": replace(GRPO, logprob_tokens=1 << 20)},
            r"log-probabilities on stage 0: .* Lower policy\.logprob_batch_size\.$",
        ),
        (
            {"optimizer": Optimizer()},
            r"optimizer step on stage 0: .* Set policy\.megatron_cfg\.optimizer\.optimizer_cpu_offload=true",
        ),
    ],
)
def test_what_lacks_is_said_with_the_numbers(changes: dict[str, object], expected: str) -> None:
    job = seven_billion(**changes)
    found = list(lacking(job, run_nothing(job)))
    assert re.search(expected, "\n".join(found)), found
    assert bool(found) == bool(expected)


def test_a_host_of_less_memory_than_its_ranks_take_is_refused() -> None:
    job = seven_billion(host_budget=0.9)
    small = replace(job, device=replace(job.device, host_memory_gib=96.0, devices_per_node=1))
    assert any("a machine has 96.0 GiB" in text for text in lacking(small, run_nothing(small)))
    enough = replace(job, device=replace(job.device, host_memory_gib=128.0, devices_per_node=1))
    assert not list(lacking(enough, run_nothing(enough)))


@pytest.mark.parametrize("changes", [{}, {"generation_rows": 1 << 13}], ids=["fits", "generation lacks room"])
def test_a_change_would_do_where_no_phase_lacks_anything_with_it(changes: dict[str, int]) -> None:
    job = replace(seven_billion(passes=replace(GRPO, **changes)), optimizer=Optimizer(), num_microbatches=2)
    (text, *more) = make_plan(job).suggestions
    way = "policy.megatron_cfg.optimizer.optimizer_cpu_offload=true"
    if not changes:
        assert text.startswith(way)
    else:
        assert text.startswith(f"{NONE_TRIED}; with {way}")
        assert "and there is left: generation on stage 0:" in text
        assert text.endswith("Lower policy.generation_batch_size.")
        assert not more


@pytest.mark.slow
def test_the_optimizer_on_the_host_is_proposed_where_it_would_do() -> None:
    """7B and Adam's state are more than one card; what is proposed fits."""
    job = replace(seven_billion(), optimizer=Optimizer(), num_microbatches=2)
    plan = make_plan(job)
    assert plan.shortfall_bytes > 0
    (share,) = [
        float(found[1])
        for text in plan.suggestions
        if (found := re.fullmatch(r"\S+\.optimizer_cpu_offload=true \S+\.optimizer_offload_fraction=([\d.]+)", text))
    ]
    assert make_plan(replace(job, optimizer=Optimizer(share_on_host=share))).shortfall_bytes == 0
    starved = make_plan(replace(job, host_budget=20 * GIB))
    assert not any("optimizer_offload_fraction" in text for text in starved.suggestions)


@pytest.mark.slow
def test_as_much_of_the_optimizer_is_proposed_as_its_own_step_lacks() -> None:
    """The step's buffers come on top of the state, of which training alone would do with less on the host."""
    job = replace(seven_billion(), optimizer=Optimizer(), num_microbatches=2)
    for memory_gib in (75, 100):
        tight = replace(job, memory_bytes=memory_gib * GIB)
        plan = make_plan(tight)
        for text in plan.suggestions:
            if found := re.fullmatch(r"\S+\.optimizer_cpu_offload=true \S+\.optimizer_offload_fraction=([\d.]+)", text):
                changed = make_plan(replace(tight, optimizer=Optimizer(share_on_host=float(found[1]))))
                assert not [each for each in changed.lacking if "optimizer step" in each], memory_gib
                assert changed.shortfall_bytes == 0


@pytest.mark.parametrize("given", [0.0, 0.25])
@pytest.mark.parametrize("memory_gib", [30, 45, 60, 75, 90, 105])
def test_an_optimizers_step_is_told_the_share_that_gives_it_room(memory_gib: int, given: float) -> None:
    job = seven_billion(optimizer=Optimizer(share_on_host=given), memory_bytes=memory_gib * GIB)
    of_update = [each for each in lacking(job, run_nothing(job)) if each.startswith("optimizer step")]
    if not of_update:
        return
    if (found := re.search(r"optimizer_offload_fraction=([\d.]+)", of_update[0])) is None:
        assert "all of the optimizer on the host there is too little" in of_update[0]
        share, has_room = 1.0, False
    else:
        share, has_room = float(found[1]), True
    for tried, fits in ((share, has_room), (share - 0.25, False)):
        changed = replace(job, optimizer=Optimizer(share_on_host=tried))
        still = [each for each in lacking(changed, run_nothing(changed)) if each.startswith("optimizer step")]
        assert (not still) == fits, (tried, of_update, still)


NARROW = Optimizer(share_on_host=1.0, gradient_bytes=2, gradient_copy_bytes=4)


def test_narrow_gradients_are_copied_to_float32_while_the_optimizer_steps() -> None:
    """On an H200, 7B with bfloat16 gradients and its optimizer on the host: tensors took 57.65 GiB in that step."""
    job = seven_billion(optimizer=NARROW)
    phase = phases_of(job)["optimizer step"]
    assert phase.parts[GRADIENT_COPIES] == 4 * model_parameters(job.shape)
    tensors = phase.peak_bytes - phase.parts["runtime"] - phase.parts["fragmentation"]
    assert tensors == pytest.approx(61_904_311_296, rel=0.003)
    split = replace(job, layout=ParallelLayout(8))
    assert phases_of(split)["optimizer step"].parts[GRADIENT_COPIES] * 8 == pytest.approx(phase.parts[GRADIENT_COPIES])
    assert GRADIENT_COPIES not in phases_of(seven_billion())["optimizer step"].parts


@pytest.mark.parametrize("could_read", [False, True])
def test_an_optimizer_that_reads_narrow_gradients_is_proposed_where_copies_have_no_room(could_read: bool) -> None:
    """Where it is not allowed, float32 gradients take 2 bytes a parameter less in the step, and 2 more before it."""
    told = {}
    for memory_gib in (30, 40, 60, 70):
        optimizer = replace(NARROW, could_read_gradients=could_read)
        job = seven_billion(optimizer=optimizer, sequence=1024, memory_bytes=memory_gib * GIB)
        found = "".join(each for each in lacking(job, run_nothing(job)) if each.startswith("optimizer step"))
        assert bool(found) == (memory_gib < 70)
        told[memory_gib] = re.findall("use_precision_aware_optimizer=true|grad_reduce_in_fp32=true", found)
    reads, wide = ["use_precision_aware_optimizer=true"], ["grad_reduce_in_fp32=true"]
    assert told == {30: [], 40: reads if could_read else [], 60: reads if could_read else wide, 70: []}


def test_what_is_proposed_leaves_training_its_room() -> None:
    """Float32 gradients are there in training too, where they moved the shortage."""
    optimizer = replace(NARROW, could_read_gradients=False)
    job = seven_billion(optimizer=optimizer, sequence=1024, memory_bytes=60 * GIB)
    step = run_nothing(job)
    assert "grad_reduce_in_fp32=true" in "".join(lacking(job, step))
    full = replace(job, memory_bytes=step.peak_bytes(0) + GIB)
    assert "grad_reduce_in_fp32=true" not in "".join(lacking(full, step))


def test_both_keys_are_proposed_where_neither_is_enough() -> None:
    optimizer = replace(NARROW, share_on_host=0.25, could_read_gradients=True)
    job = seven_billion(optimizer=optimizer, memory_bytes=40 * GIB)
    (said,) = [each for each in lacking(job, run_nothing(job)) if each.startswith("optimizer step")]
    found = re.search(r"use_precision_aware_optimizer=true \S+cpu_offload=true \S+fraction=([\d.]+) for that", said)
    assert found, said
    aware = Optimizer(gradient_bytes=2, master_bytes=2, share_on_host=float(found[1]))
    changed = replace(job, optimizer=aware)
    assert not [each for each in lacking(changed, run_nothing(changed)) if each.startswith("optimizer step")]


@pytest.mark.slow
def test_less_of_the_optimizer_on_the_host_is_said_to_fit_too() -> None:
    job = make_job("Qwen/Qwen2.5-1.5B", layout=ALONE, passes=GRPO, makes_logits=False)
    most = highest_peak(run_nothing(job))
    tight = replace(job, optimizer=ON_HOST, memory_bytes=most - 8 * GIB)
    share = make_plan(tight).least_optimizer_share
    assert share is not None
    assert 0 < share < 1

    def fits(share: float) -> bool:
        changed = replace(tight, optimizer=Optimizer(share_on_host=share))
        step = run_nothing(changed)
        return highest_peak(step) <= changed.budget_bytes and not list(lacking(changed, step))

    assert fits(share)
    assert not fits(share - 0.06)
    assert make_plan(replace(tight, optimizer=Optimizer(share_on_host=share))).least_optimizer_share is None
    assert make_plan(job).least_optimizer_share is None


def test_keys_and_values_are_those_of_the_cache() -> None:
    """Of 7B: 28 layers, 4 key heads of 128, two bytes."""
    parts = phases_of(seven_billion())["generation"].parts
    assert parts["keys and values"] == 32 * 1024 * 28 * 2 * 4 * 128 * 2


def test_the_picture_has_a_bar_for_each_phase_and_each_part() -> None:
    plan = make_plan(seven_billion())
    data = plan_data(plan)
    text = phases_svg(data)
    for rank, phase in fullest(plan.chosen_job, plan.chosen):
        assert rank == 0
        assert f">{phase.name}</text>" in text
    num_parts = sum(len(phase["parts"]) for phase in data["phases"]) + len(data["host"]["parts"])
    names = {name for phase in data["phases"] for name in phase["parts"]} | set(data["host"]["parts"])
    assert text.count("<rect") == num_parts + len(names)
    ends = [float(x) + float(width) for x, width in re.findall(r"<rect x='([\d.]+)' y='[\d.]+' width='([\d.]+)'", text)]
    assert max(ends) <= 190 + 640 + 1
