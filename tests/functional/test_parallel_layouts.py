"""Parallel layouts train and sample as one rank does, and offloading changes no bit in any of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ranks import Ranks, relative_error

from nemo_rl_offload.specs.offload_modules import DENSE_MLP_MODULES, MOE_MODULES, SUPPORTED_MODULES

if TYPE_CHECKING:
    from rank_work import Outcome

# Sums in another order differ by 1e-6 in the first step. Two updates at this rate make that ten times as much.
TOLERANCE = 3e-5
pytestmark = [pytest.mark.slow, pytest.mark.sampled]

TP = "tensor_model_parallel_size=2"
SP = "sequence_parallel=true"
PP = "pipeline_model_parallel_size=2"
EP = "expert_model_parallel_size=2"
ETP = "expert_tensor_parallel_size=2"
CP = "context_parallel_size=2"
VPP = (PP, "virtual_pipeline_model_parallel_size=2", "overlap_p2p_comm=true", "batch_p2p_comm=false")
# ranks, settings
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "dp2": (2, ()),
    "tp2": (2, (TP,)),
    "tp2-sp": (2, (TP, SP)),
    "pp2": (2, (PP,)),
    "pp2-vpp2": (2, VPP),
    "ep2": (2, (EP,)),
    "ep2-allgather": (2, (EP, "moe_token_dispatcher_type=allgather")),
    "tp2-sp-ep2": (2, (TP, SP, EP)),
    "etp2": (2, (ETP,)),
    "etp2-allgather": (2, (ETP, "moe_token_dispatcher_type=allgather")),
    "tp2-sp-etp2": (2, (TP, SP, ETP)),
    "cp2-etp2": (2, (CP, ETP)),
    "ep2-etp2": (4, (EP, ETP)),
    "tp2-sp-ep2-etp2": (4, (TP, SP, EP, ETP)),
    "pp2-etp2": (4, (PP, ETP)),
    "pp2-tp2": (4, (PP, TP)),
    "pp2-ep2": (4, (PP, EP)),
    "pp2-vpp2-tp2-sp": (4, (*VPP, TP, SP)),
    "pp2-uneven": (2, (PP, "num_layers_in_first_pipeline_stage=1")),
    "pp2-stages": (2, (PP, 'pipeline_model_parallel_layout="Ettt|t(m)*1L"')),
    "pp2-vpp2-stages": (2, (*VPP, 'pipeline_model_parallel_layout="E|t*3|t|L"')),
    "cp2": (2, (CP,)),
    "cp2-ep2": (2, (CP, EP)),
    "cp2-tp2-sp": (4, (CP, TP, SP)),
    "pp2-cp2": (4, (PP, CP)),
    "cp4": (4, ("context_parallel_size=4",)),
    "dp2-cp2": (4, (CP,)),
}
_DENSE = tuple(name for name in SUPPORTED_MODULES if name not in MOE_MODULES)
MODULES = {
    **dict.fromkeys(("qwen2", "qwen2_odd", "llama", "llama_odd", "gemma3_text"), _DENSE),
    "qwen3_moe": tuple(name for name in SUPPORTED_MODULES if name not in (*DENSE_MLP_MODULES, "shared_experts")),
    **dict.fromkeys(
        (
            "deepseek_v3_mtp",
            "deepseek_v3_mtp_odd",
            "glm4_moe_lite_mtp",
            "nemotron_h",
            "nemotron_h_latent",
            "nemotron_h_mtp",
        ),
        SUPPORTED_MODULES,
    ),
    "qwen3_5_text": _DENSE,
    "qwen3_5_moe_text": tuple(name for name in SUPPORTED_MODULES if name not in DENSE_MLP_MODULES),
    "gpt_oss": tuple(name for name in SUPPORTED_MODULES if name not in (*DENSE_MLP_MODULES, "shared_experts")),
    **dict.fromkeys(
        ("llama_biased", "qwen2_windowed"), tuple(name for name in SUPPORTED_MODULES if name not in MOE_MODULES)
    ),
}
ALONE = ("one", "tp2", "pp2-tp2", "cp2", "pp2-uneven", "pp2-stages", "pp2-vpp2-stages", "cp4", "dp2-cp2")
# A loss that is a microbatch's own mean (further tokens; the balance of experts, off here) depends on how a batch is
# cut: data parallelism cuts it anew, and interleaving fills up nine microbatches with an empty one.
CASES = [
    *(("qwen2", layout) for layout in ("dp2", "tp2", "tp2-sp", "pp2", "pp2-vpp2", "pp2-tp2", "pp2-vpp2-tp2-sp")),
    *(("qwen2", "pp2-vpp2-stages"), ("deepseek_v3_mtp", "pp2-stages")),
    *(("qwen2", layout) for layout in ("pp2-uneven", "cp2", "cp2-tp2-sp", "pp2-cp2")),
    *(("qwen3_moe", layout) for layout in LAYOUTS if layout not in ALONE),
    *(("deepseek_v3_mtp", layout) for layout in ("tp2-sp", "pp2", "pp2-vpp2", "tp2-sp-ep2", "cp2", "tp2-sp-etp2")),
    *(("gpt_oss", layout) for layout in ("tp2-sp-ep2", "pp2")),
    *(("glm4_moe_lite_mtp", layout) for layout in ("tp2-sp-ep2", "pp2")),
    *(("llama_biased", "tp2-sp"), ("qwen2_windowed", "cp2")),
    *(("gemma3_text", layout) for layout in ("tp2", "tp2-sp", "pp2-vpp2", "cp2")),
    *(("nemotron_h", layout) for layout in ("tp2-sp-ep2", "pp2-vpp2", "cp2", "cp2-ep2", "cp2-tp2-sp", "cp4")),
    *(("nemotron_h_latent", layout) for layout in ("tp2-sp-ep2", "tp2-sp", "pp2", "tp2-sp-etp2")),
    *(("qwen3_5_text", layout) for layout in ("dp2", "tp2", "tp2-sp", "pp2", "cp2", "cp2-tp2-sp", "cp4")),
    *(("qwen3_5_moe_text", layout) for layout in ("ep2", "tp2-sp-ep2", "pp2-vpp2", "etp2")),
    *(("qwen2_odd", "pp2-tp2"), ("llama_odd", "tp2-sp"), ("deepseek_v3_mtp_odd", "tp2-sp")),
]
CUT_ALIKE = [case for case in CASES if case != ("deepseek_v3_mtp", "pp2-vpp2")]
VARIED = [("qwen2", "pp2-vpp2"), ("qwen3_moe", "tp2-sp-ep2"), ("deepseek_v3_mtp", "pp2")]
SGD = (
    "optimizer.optimizer=sgd",
    "optimizer.lr=0.3",
    "optimizer.clip_grad=0",
    "optimizer.use_distributed_optimizer=false",
    "scheduler.lr_warmup_iters=0",
    "moe_aux_loss_coeff=0",
    "moe_router_bias_update_rate=0",
)
# Numbers of lengths and samples: 4, 9 and 1 microbatches of two samples where all ranks share a batch.
STEPS = ((0, 8), (1, 18), (2, 2))


def _tokens(section: str) -> tuple[str, ...]:
    return f".{section}.train_mb_tokens=40", f".{section}.sequence_length_round=1"


AUTO = ("offload_modules=auto", 'activation_offload.gpu_memory_budget="32KiB"')
SETTINGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "bfloat16": (".precision=bfloat16",),
    "recompute_full": ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"),
    "recompute_core_attn": ("recompute_granularity=selective", "recompute_modules=[core_attn]"),
    "recompute_mlps": (
        "recompute_granularity=selective",
        "recompute_modules=[mlp_act,mlp_fc1]",
        "recompute_num_layers=1",
    ),
    "distributed_adam": ("optimizer.optimizer=adam", "optimizer.use_distributed_optimizer=true"),
    "auto": AUTO,
    "auto_of_large_tensors": (*AUTO, "min_offloaded_tensor_size=1600"),
    "dynamic_batching": (".dynamic_batching.enabled=true", *_tokens("dynamic_batching")),
    "sequence_packing": (".sequence_packing.enabled=true", *_tokens("sequence_packing")),
    "packed_rows": (),
    "logits": ("use_fused_linear_logprobs=false",),
    "packs_of_logits": (
        "use_fused_linear_logprobs=false",
        ".logprob_chunk_size=3",
        ".sequence_packing.enabled=true",
        *_tokens("sequence_packing"),
    ),
    "packed_rows_recomputed": (
        "recompute_granularity=full",
        "recompute_method=uniform",
        "recompute_num_layers=1",
    ),
    "packed_rows_half_recomputed": ("recompute_granularity=selective", "recompute_modules=[core_attn]"),
    "packed_rows_logits": ("use_fused_linear_logprobs=false",),
    "head_by_tokens": ("fused_linear_logprobs_chunk_size=7",),
    "half_of_the_groups": ("activation_offload_fraction=0.5", "delta_offload_bytes_across_pp_ranks=1000"),
}
NOT_BESIDE = (
    *("plain", "auto_of_large_tensors", "logits", "head_by_tokens"),
    *(name for name in SETTINGS if name.startswith("pack")),
)
BY_TOKENS = ("dynamic_batching", "sequence_packing")
# Sequences of packs that ranks share. Packs of the fixed microbatches' rows have those microbatches' means.
SPLIT_PACKS = [
    *(("llama", layout, "sequence_packing") for layout in ("cp2", "cp2-tp2-sp", "pp2-cp2")),
    *(
        (family, layout, "sequence_packing")
        for family in ("qwen2", "qwen3_moe")
        for layout in ("cp2-tp2-sp", "pp2-cp2")
    ),
    *(("deepseek_v3_mtp", layout, "packed_rows") for layout in ("cp2", "cp2-tp2-sp", "pp2-cp2")),
    *(("deepseek_v3_mtp", "cp2", "packed_rows_logits"), ("qwen2", "cp2", "packed_rows_logits")),
    *(("gpt_oss", "cp2", "sequence_packing"), ("qwen2", "cp4", "sequence_packing")),
    ("qwen2", "dp2-cp2", "sequence_packing"),
    *(("nemotron_h", layout, "sequence_packing") for layout in ("cp2-tp2-sp", "cp4")),
    ("qwen3_5_text", "cp4", "sequence_packing"),
]
Train = Callable[..., "list[Outcome]"]


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], Ranks]) -> Callable[..., list[Any]]:
    """Call a function of `rank_work` on the ranks of a layout."""

    def on_ranks(layout: str, function: str, *args: Any, **how: Any) -> list[Any]:
        return ranks(LAYOUTS[layout][0]).run(function, *args, **how)

    return on_ranks


@pytest.fixture(scope="module")
def folder(run: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model of four layers."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            (folders[family],) = run("one", "write", family, tmp_path_factory.mktemp(family))
        return folders[family]

    return folder_of


@pytest.fixture(scope="module")
def train(run: Callable[..., list[Any]], folder: Callable[[str], Path]) -> Train:
    """Three steps in a layout, each combination once; the outcomes of all ranks."""
    outcomes: dict[tuple[Any, ...], list[Outcome]] = {}

    def train_in(family: str, layout: str, setting: str = "plain", modules: tuple[str, ...] = ()) -> list[Outcome]:
        key = (family, layout, setting, modules)
        if key not in outcomes:
            listed = ("fine_grained_activation_offloading=true", f"offload_modules=[{','.join(modules)}]")
            overrides = (*SGD, *LAYOUTS[layout][1], *(listed if modules else ()), *SETTINGS[setting])
            how = {"packs_rows": True} if setting.startswith("packed_rows") else {}
            outcomes[key] = run(layout, "train", folder(family), overrides, STEPS, **how)
        return outcomes[key]

    return train_in


def share_each_batch(layout: str) -> bool:
    """Whether all ranks of a layout do, of which none is data parallel."""
    num_ranks, settings = LAYOUTS[layout]
    sizes = dict(setting.split("=", 1) for setting in settings)
    names = ("tensor_model", "pipeline_model", "context")
    return num_ranks == math.prod(int(sizes.get(f"{name}_parallel_size", 1)) for name in names)


def assert_same_bits(outcomes: list[Outcome], references: list[Outcome]) -> None:
    for outcome, reference in zip(outcomes, references, strict=True):
        assert outcome.metrics == reference.metrics
        assert outcome.digests == reference.digests
        assert outcome.host_bytes == 0
    assert all(metrics["grad_norm"] > 0 for metrics in references[0].metrics)
    assert len(set(references[0].digests)) == len(references[0].digests), "every step has gradients of its own"


@pytest.mark.parametrize(("family", "layout"), CUT_ALIKE)
def test_a_layout_trains_as_one_rank_does(family: str, layout: str, train: Train) -> None:

    (one,), outcomes = train(family, "one"), train(family, layout)
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    assert relative_error(outcomes[0].gradients, one.gradients) < TOLERANCE
    assert relative_error(outcomes[0].weights, one.weights) < TOLERANCE
    assert one.logprobs is not None
    if share_each_batch(layout):
        num_silent = len(outcomes) // 2 if "pp2" in layout else 0
        assert [outcome.logprobs is None for outcome in outcomes].count(True) == num_silent
        assert outcomes[-1].logprobs == pytest.approx(one.logprobs, abs=1e-4)


# Further tokens have a loss that is a microbatch's own mean, and so depends on what shares one. Four ranks pass too,
# and are left out for their time.
@pytest.mark.parametrize(
    ("family", "layout", "setting"),
    [(*case, setting) for case in CASES for setting in BY_TOKENS if "mtp" not in case[0] and LAYOUTS[case[1]][0] == 2]
    + SPLIT_PACKS,
)
def test_microbatches_by_tokens_train_as_fixed_ones_do(family: str, layout: str, setting: str, train: Train) -> None:
    (one,), outcomes = train(family, "one"), train(family, layout, setting)
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    assert relative_error(outcomes[0].gradients, one.gradients) < TOLERANCE
    assert relative_error(outcomes[0].weights, one.weights) < TOLERANCE
    if share_each_batch(layout):
        assert outcomes[-1].logprobs == pytest.approx(one.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "layout", "setting"),
    [
        ("qwen2", "cp2-tp2-sp", "sequence_packing"),
        ("qwen2", "cp2-tp2-sp", "packs_of_logits"),
        ("deepseek_v3", "pp2-cp2", "sequence_packing"),
    ],
)
def test_all_losses_and_a_teachers_tokens_of_split_packs(
    family: str, layout: str, setting: str, run: Callable[..., list[Any]], folder: Callable[[str], Path]
) -> None:
    ((expected, expected_top),) = run("one", "learn", folder(family), SGD)
    outcomes = run(layout, "learn", folder(family), (*SGD, *LAYOUTS[layout][1], *SETTINGS[setting]))
    (learned, _), (last, top) = outcomes[0], outcomes[-1]
    for name, wanted in expected.items():
        assert last[name].evaluated == pytest.approx(wanted.evaluated, rel=TOLERANCE), name
        assert last[name].metrics == pytest.approx(wanted.metrics, rel=TOLERANCE), name
        assert relative_error(learned[name].gradients, wanted.gradients) < TOLERANCE, name
    assert top[0] == pytest.approx(expected_top[0], abs=1e-4)
    assert (top[1] == expected_top[1]).all()


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen2", layout) for layout in ("one", "tp2", "tp2-sp", "pp2-vpp2", "cp2-tp2-sp")),
        *(("deepseek_v3_mtp", layout) for layout in ("one", "tp2-sp", "pp2")),
        *(("qwen3_moe", "tp2-sp-ep2"), ("gpt_oss", "pp2")),
        *(("qwen2_odd", "tp2"), ("llama_odd", "tp2-sp"), ("deepseek_v3_mtp_odd", "tp2-sp")),
    ],
)
def test_the_head_without_logits_trains_as_logits_do(family: str, layout: str, train: Train) -> None:
    expected = train(family, layout, "logits")
    for setting in ("plain", "head_by_tokens"):
        outcomes = train(family, layout, setting)
        for metrics, wanted in zip(outcomes[-1].metrics, expected[-1].metrics, strict=True):
            assert metrics == pytest.approx(wanted, rel=TOLERANCE, abs=1e-7)
        assert relative_error(outcomes[0].gradients, expected[0].gradients) < TOLERANCE
        assert relative_error(outcomes[0].weights, expected[0].weights) < TOLERANCE
        assert outcomes[-1].logprobs == pytest.approx(expected[-1].logprobs, abs=1e-4)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_offloading_changes_no_bit(family: str, layout: str, train: Train) -> None:
    outcomes = train(family, layout, modules=MODULES[family])
    assert_same_bits(outcomes, train(family, layout))
    for name in MODULES[family]:
        assert sum(outcome.bytes_out.get(name, 0) for outcome in outcomes) > 0, name
    assert all(sum(outcome.bytes_out.values()) > 0 for outcome in outcomes)


@pytest.mark.parametrize(
    ("family", "layout", "setting"),
    [
        *(("deepseek_v3_mtp", layout, "packed_rows") for layout in ("cp2", "pp2-cp2")),
        *((family, "cp2", "packed_rows") for family in ("nemotron_h", "qwen3_5_text")),
        *(("nemotron_h", "cp2", setting) for setting in ("packed_rows_recomputed", "packed_rows_half_recomputed")),
        *(("qwen2", "cp2", setting) for setting in ("packed_rows_recomputed", "packed_rows_half_recomputed")),
    ],
)
def test_offloading_changes_no_bit_of_split_packs(family: str, layout: str, setting: str, train: Train) -> None:
    modules = ("attn_norm",) if setting == "packed_rows_recomputed" else MODULES[family]
    outcomes = train(family, layout, setting, modules)
    assert_same_bits(outcomes, train(family, layout, "packed_rows"))
    for name in set(modules) - ({"core_attn"} if "half" in setting else set()):
        assert sum(outcome.bytes_out.get(name, 0) for outcome in outcomes) > 0, name


@pytest.mark.parametrize(("family", "layout"), VARIED)
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name not in NOT_BESIDE])
def test_offloading_changes_no_bit_beside(family: str, layout: str, setting: str, train: Train) -> None:
    outcomes = train(family, layout, setting, MODULES[family])
    assert_same_bits(outcomes, train(family, layout, setting))
    moved = sum(sum(outcome.bytes_out.values()) for outcome in outcomes)
    if setting == "half_of_the_groups":
        whole = sum(sum(outcome.bytes_out.values()) for outcome in train(family, layout, modules=MODULES[family]))
        assert 0 < moved < whole
    else:
        assert moved > 0


def test_auto_plans_where_ranks_have_different_groups(train: Train) -> None:
    """Tokens are routed so that one rank's experts save 24 groups of tensors that are large enough, the other's 21."""
    outcomes = train("qwen3_moe", "ep2", "auto_of_large_tensors", MODULES["qwen3_moe"])
    assert_same_bits(outcomes, train("qwen3_moe", "ep2"))
    assert outcomes[0].bytes_out != outcomes[1].bytes_out


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2-vpp2"])
def test_parts_of_mlps_are_recomputed_to_the_same_bits(layout: str, train: Train) -> None:
    """Their second run gathers a sequence over tensor-parallel ranks as the first did, inside of backward."""
    assert_same_bits(train("qwen2", layout, "recompute_mlps"), train("qwen2", layout))


@pytest.mark.parametrize(
    ("family", "layout", "module"), [(*case, module) for case in VARIED for module in MODULES[case[0]]]
)
def test_each_module_alone_changes_no_bit(family: str, layout: str, module: str, train: Train) -> None:
    modules = ("core_attn", "attn_proj") if module == "attn_proj" else (module,)
    outcomes = train(family, layout, modules=modules)
    assert_same_bits(outcomes, train(family, layout))
    for name in modules:
        assert sum(outcome.bytes_out.get(name, 0) for outcome in outcomes) > 0


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_layout_samples_as_one_rank_does(
    family: str, layout: str, run: Callable[..., list[Any]], folder: Callable[[str], Path]
) -> None:
    # Three generation batches: of different lengths, of one length above 1, of one row.
    prompts = [[5, 7, 9], [11], [3, 1, 4, 1, 5], [2, 6], [200, 100], [4, 40, 4], [80, 9, 10]]
    (expected,) = run("one", "sample", folder(family), SGD, prompts)
    assert [len(tokens) for tokens in expected] == [6] * len(prompts)
    assert (
        run(layout, "sample", folder(family), (*SGD, *LAYOUTS[layout][1]), prompts) == [expected] * LAYOUTS[layout][0]
    )
