"""Rules about the number of workers: what breaks each, the essential words, a legal neighbor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import check_config

Refusals = Callable[[str], list[str]]
Refuses = Callable[[str, str, str, str], None]

WORKERS, SIZES = "cluster.gpus_per_node", "policy.megatron_cfg"
BATCH, DYNAMIC = "policy.train_global_batch_size", "policy.dynamic_batching.enabled"
APART = "policy.generation.colocated.enabled=false policy.generation.colocated.resources"
WHOLE = "M.fine_grained_activation_offloading=false M.offload_modules=null"
FUSED = f"M.transformer_impl=transformer_engine {WHOLE}"
FUSER = (f"{SIZES}.use_transformer_engine_op_fuser", "Tensor parallelism is not supported, says Megatron-Core of fused")
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}

CASES = [
    (
        f"{WORKERS}=3 {SIZES}.tensor_model_parallel_size=2",
        WORKERS,
        "= 2 x 1 x 1 = 2 does not divide 3 worker(s). Lower tensor_model_parallel_size, or raise",
        f"{WORKERS}=4",
    ),
    (
        f"{WORKERS}=2 {SIZES}.context_parallel_size=4",
        WORKERS,
        "Lower context_parallel_size, or raise cluster.gpus_per_node: 4 worker(s)",
        f"{WORKERS}=4",
    ),
    (
        f"{WORKERS}=1 cluster.num_nodes=3 {SIZES}.pipeline_model_parallel_size=2",
        WORKERS,
        "does not divide 3 worker(s)",
        "cluster.num_nodes=4",
    ),
    (
        f"{WORKERS}=4",
        BATCH,
        "64 x 4 = 256. Set it to 256, or train_micro_batch_size to 32, or change the",
        "policy.train_micro_batch_size=32",
    ),
    (f"{WORKERS}=3", BATCH, "128 is not a multiple of train_micro_batch_size x", f"{DYNAMIC}=true"),
    (f"{WORKERS}=3", BATCH, "128 is not a multiple of train_micro_batch_size x", f"{WORKERS}=auto"),
    (f"{WORKERS}=4 {APART}.gpus_per_node=1", BATCH, "64 x 3 = 192", f"{APART}.gpus_per_node=2"),
    (
        f"{WORKERS}=5 {APART}.gpus_per_node=1 {SIZES}.tensor_model_parallel_size=2",
        WORKERS,
        "does not divide 1 worker(s)",
        f"{WORKERS}=6 {APART}.gpus_per_node=2",
    ),
    (
        f"{WORKERS}=256 {DYNAMIC}=true",
        BATCH,
        "128 for 256 data-parallel ranks, of which 128 would have nothing to do. Set at least 256",
        f"{WORKERS}=128",
    ),
    (f"{WORKERS}=1 cluster.num_nodes=4 {APART}.num_nodes=1", BATCH, "64 x 3 = 192", f"{APART}.num_nodes=2"),
]


@pytest.mark.parametrize(("change", "path", "words", "neighbor"), CASES)
def test_counts_that_do_not_divide(change: str, path: str, words: str, neighbor: str, refuses: Refuses) -> None:
    refuses(change, path, words, neighbor)


def test_experts(refuses: Refuses) -> None:
    change = f"MOE {SIZES}.expert_model_parallel_size=4 policy.train_micro_batch_size=1 {WORKERS}"
    refuses(f"{change}=2", f"{SIZES}.expert_model_parallel_size", "4 does not divide the 2 worker(s)", f"{WORKERS}=4")


def test_shared_widths_of_experts(refusals: Refusals, refuses: Refuses, make_model: Callable[..., Path]) -> None:
    path = f"{SIZES}.expert_tensor_parallel_size"
    refuses(f"{path}=2", path, "the model has no experts. Set it to 1", "MOE")
    refuses(f"MOE {path}=5", path, "5 does not divide the experts' width 48. The nearest that does is 4.", f"{path}=3")
    words = (
        "4 ranks of an expert of width 48 have rows of 24 bytes each, and products of groups in torch take multiples"
    )
    refuses(f"MOE {path}=4 M.transformer_impl=torch policy.precision=bfloat16", path, words, "M.transformer_impl=auto")
    biased = make_model(
        model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, intermediate_size=8, sliding_window=8
    )
    words = "which have biases: Bias in Moe is only supported when ETP==1, says Megatron-Core"
    refuses(f"policy.model_name={biased} {path}=2", path, words, f"{path}=1")
    refuses(f"MOE {path}=2 M.use_transformer_engine_op_fuser=true {FUSED}", *FUSER, f"{path}=1")
    both = f"MOE {path}=2 {SIZES}.expert_model_parallel_size=4 policy.train_micro_batch_size=1 {WORKERS}"
    (line,) = refusals(f"{both}=4")
    assert "4 x expert_tensor_parallel_size 2 = 8 does not divide the 4 worker(s) of a pipeline stage" in line
    assert refusals(f"{both}=8") == []


def test_a_batch_that_no_number_of_workers_cuts_is_reported_once(refusals: Refusals) -> None:
    (line,) = refusals(f"{WORKERS}=3 policy.train_micro_batch_size=60")
    assert line.endswith("60 x 3 = 180. Set it to 180.")
    (line,) = refusals(
        f"{WORKERS}=2 policy.train_global_batch_size=10 policy.train_micro_batch_size=4 "
        "grpo.num_prompts_per_step=5 grpo.num_generations_per_prompt=2"
    )
    assert line.endswith("4 x 2 = 8. Set it to 8, or train_micro_batch_size to 1.")


def test_virtual_stages(refusals: Refusals) -> None:
    stages = f"{SIZES}.pipeline_model_parallel_size=2 {SIZES}.virtual_pipeline_model_parallel_size=2"
    (line,) = refusals(f"{WORKERS}=2 {stages} {SIZES}.batch_p2p_comm=false policy.train_micro_batch_size=128")
    assert "a step's 1 microbatches must be a multiple of the 2 pipeline ranks. Set it to a multiple of 256." in line


EXAMPLES = PROJECT_ROOT / "examples" / "configs"


@pytest.mark.sampled(18)
@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml") if path.name != "base.yaml"))
def test_every_example_runs_on_machines_of_any_usual_size(name: str, num_gpus: int) -> None:
    """With `auto`, the machine says how many workers there are."""
    number = load_config(EXAMPLES / name, [])["cluster"]["gpus_per_node"]
    overrides = [f"cluster.gpus_per_node={num_gpus}"] if number == "auto" else []
    check_config(load_config(EXAMPLES / name, overrides), run_here=False)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"model_type": "mistral"}, "sliding windows"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding windows"),
        (
            {
                "model_type": "gpt_oss",
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 8,
            },
            "attention sinks",
        ),
    ],
)
def test_transformer_engine_has_no_windows_and_sinks_in_packs_that_ranks_share(
    shape: dict[str, Any], words: str, make_model: Callable[..., Path], refuses: Refuses
) -> None:
    packs = "policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=20000"
    change = f"policy.model_name={make_model(**shape)} {packs} M.transformer_impl=transformer_engine {WHOLE}"
    path = f"{SIZES}.context_parallel_size"
    for legal in (f"{path}=1", "M.transformer_impl=torch", "policy.sequence_packing.enabled=false"):
        refuses(f"{change} {path}=2", path, words, legal)


def test_other_packs_may_be_shared(refusals: Refusals) -> None:
    packs = "policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=20000"
    assert refusals(f"{packs} M.transformer_impl=transformer_engine {WHOLE} {SIZES}.context_parallel_size=2") == []


@pytest.mark.parametrize(
    ("teacher", "layout", "words", "neighbor"),
    [
        ({"num_hidden_layers": 5}, "pipeline_model_parallel_size=2", "does not divide the teacher's 5 layers", 6),
        (
            {"num_hidden_layers": 5},
            "pipeline_model_parallel_size=2 M.pipeline_model_parallel_layout='Ett|ttL'",
            "does not divide the teacher's 5 layers",
            10,
        ),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "tensor_model_parallel_size=2",
            "the teacher's 3 and 3 heads",
            None,
        ),
        ({"num_key_value_heads": 3}, "tensor_model_parallel_size=2", "the teacher's 4 and 3 heads", None),
        ({}, "expert_model_parallel_size=2", "does not divide the teacher's 0 experts", None),
        ({"num_experts": 3}, "expert_model_parallel_size=2", "does not divide the teacher's 3 experts", None),
        ({"num_experts": 4}, "tensor_model_parallel_size=2", "need sequence_parallel beside", None),
        (
            {"num_experts": 4, "moe_intermediate_size": 9},
            "expert_tensor_parallel_size=2",
            "the student's, is the teacher's too: 2 does not divide the experts' width 9. The nearest that does is",
            None,
        ),
        (
            {
                "model_type": "nemotron_h",
                "hybrid_override_pattern": "M-M*",
                "hidden_act": None,
                "mamba_num_heads": 6,
                "n_groups": 3,
            },
            "context_parallel_size=2",
            "the student's, is the teacher's too: 2 ranks and the 3 groups of heads in Mamba-2 layers do not divide",
            None,
        ),
    ],
)
def test_a_teacher_is_divided_like_the_student(
    teacher: dict[str, Any],
    layout: str,
    words: str,
    neighbor: int | None,
    refusals: Refusals,
    make_model: Callable[..., Path],
) -> None:
    def said(**shape: Any) -> list[str]:
        name = f"algorithm=distillation teacher.model_name={make_model(**shape)}"
        lines = refusals(f"{'MOE' if 'expert' in layout else ''} {name} M.{layout}")
        return [line for line in lines if line.startswith("teacher.model_name: ") and "teacher's" in line]

    (line,) = said(**teacher)
    assert words in line
    assert said(num_hidden_layers=neighbor or 4, **(EXPERTS if "expert" in layout else {})) == []
