"""Training with CUDA graphs of layers is training without them, bit for bit: the same kernels on the same numbers."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from models import MICRO_BATCH_SIZE, make_policy, make_rows, offload, weights_of
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model, init_process_groups
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.checkpoint import distributed
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.policy.microbatches import shard_for_ranks
from nemo_rl_offload.policy.residency.gradients import free_gradients, restore_gradients

HAS_TRANSFORMER_ENGINE = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="needs a CUDA device and Transformer Engine"),
    pytest.mark.usefixtures("any_device_process_group", "no_clock", "as_in_training"),
]

SHAPES: dict[str, dict[str, int]] = {
    "qwen2": {"hidden_size": 128, "intermediate_size": 256},
    "qwen3_moe": {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64},
}
COMMON = (
    ".precision=bfloat16",
    "transformer_impl=transformer_engine",
    "optimizer.lr=1e-3",
    "scheduler.lr_warmup_iters=0",
    "cuda_graph_warmup_steps=2",
)
UNFUSED = (*COMMON, "attention_backend=unfused")
PACKED = (
    *COMMON,
    "attention_backend=fused",
    ".sequence_packing.enabled=true",
    ".sequence_packing.train_mb_tokens=32",
    ".sequence_packing.sequence_length_round=4",
)
OF_EXPERTS = (*UNFUSED, "moe_permute_fusion=true", "moe_aux_loss_coeff=0.01")
ROUTED = "[attn,moe_router,moe_preprocess]"
REPLAYED = "cuda_graph_microbatches"

ROWS = ((16, 16, 12), (16, 16, 12), (16, 12, 16), (12, 16, 16), (16, 9, 12), (16, 16, 12), (12, 12, 16), (16, 16, 12))
"""Widths of the microbatches of each step; one of them comes once."""
EXPECTED = [0, 0, 3, 3, 2, 3, 3, 3]
EQUAL = ((16, 16, 16),) * 6
EXPECTED_OF_EQUAL = [0, 0, 3, 3, 3, 3]
LOGPROBS_AFTER = (3, 5)
"""Steps."""
NEAR = 2e-2
"""Relative. A fused kernel of attention may be another one in a graph: sums of numbers whose last bit is 2^-8."""

type Widths = tuple[tuple[int, ...], ...]


@pytest.fixture
def as_in_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels as in a run, but for attention's, which are to give the same bits twice."""
    monkeypatch.setitem(os.environ, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delitem(os.environ, name, raising=False)  # where Megatron-Core keeps the choice of attention
    torch.use_deterministic_algorithms(False)
    stream = torch.cuda.current_stream()
    yield
    torch.cuda.set_stream(stream)  # in whose place there is another where layers are captured
    torch.use_deterministic_algorithms(True)


@dataclass
class Outcome:
    metrics: list[dict[str, float]]
    """Of each step, without the number of replays."""
    replayed: list[float | None]
    weights: dict[str, Tensor]
    logprobs: list[Tensor]
    bytes_out: dict[str, int]
    were_moved: bool
    """Whether weights were found at other addresses."""


def move_weights(model: MegatronModel) -> None:
    """To other addresses; who still reads the old ones finds no numbers."""
    for layer in model.modules[0].decoder.layers:
        for weight in layer.parameters():
            old = weight.data
            weight.data = old.clone()
            old.fill_(torch.nan)


def train_once(
    folder: Path,
    overrides: tuple[str, ...],
    rows: Widths,
    *,
    moves_at: int | None = None,
    frees_gradients: bool = False,
) -> Outcome:
    policy: Any = make_policy(*overrides)
    init_process_groups(policy, seed=1)
    engine = install_offloading(policy)
    model = build_model(policy, folder, num_steps=20)
    try:
        if engine is not None:
            exclude_parameters(engine, model.modules)
        heads, loss = LogitsHeadFactory(1.0), build_loss("nll", {})
        metrics, replayed, logprobs = [], [], []
        for step, widths in enumerate(rows):
            if step == moves_at:
                move_weights(model)
            if frees_gradients:
                free_gradients(model)
                torch.cuda.empty_cache()
                restore_gradients(model)
            batch = make_rows(step, widths)
            sharded = shard_for_ranks(batch, policy, 1, "train")
            how = MICRO_BATCH_SIZE if sharded.splits is None else sharded.splits[0]
            found = train_step(model, sharded.shards[0], loss, normalizers(batch), how, heads)
            replayed.append(found.pop(REPLAYED, None))
            metrics.append(found)
            if step in LOGPROBS_AFTER:
                logprobs.append(compute_logprobs(model, sharded.shards[0], how, heads))
        stats = {} if engine is None else engine.stats().per_module
        bytes_out = {name: module.bytes_out for name, module in stats.items()}
        assert all(each is not None for each in logprobs)
        were_moved = model.graphs is not None and model.graphs._has_told
        return Outcome(metrics, replayed, weights_of(model), logprobs, bytes_out, were_moved)  # type: ignore[arg-type]
    finally:
        if model.graphs is not None:
            model.graphs.clear()
        use_engine(None)
        if engine is not None:
            engine.close()
        del model
        gc.collect()
        torch.cuda.synchronize()  # what is returned is compared on another stream


Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def train(model_folder: Callable[..., Path]) -> Train:
    """Each combination once."""
    outcomes: dict[tuple[object, ...], Outcome] = {}

    def run(family: str, *overrides: str, rows: Widths = ROWS, **how: Any) -> Outcome:
        key = (family, overrides, rows, *how.items())
        if key not in outcomes:
            outcomes[key] = train_once(model_folder(family, **SHAPES[family]), overrides, rows, **how)
        return outcomes[key]

    return run


def captured(parts: str, *others: str) -> tuple[str, ...]:
    return ("cuda_graph_impl=transformer_engine", f"cuda_graph_modules={parts}", *others)


def assert_same(outcome: Outcome, reference: Outcome, *, were_moved: bool = False) -> None:
    """What differs is shown by how much."""
    assert outcome.were_moved is were_moved, "captured anew for nothing, or not at all"
    assert outcome.metrics == reference.metrics
    assert all(metrics["grad_norm"] > 0 and metrics["skipped_updates"] == 0 for metrics in reference.metrics)
    assert outcome.weights.keys() == reference.weights.keys()
    differences = {
        name: float((weight.float() - reference.weights[name].float()).abs().max())
        for name, weight in outcome.weights.items()
    }
    assert {name: difference for name, difference in differences.items() if difference} == {}
    assert all(map(torch.equal, outcome.logprobs, reference.logprobs))
    assert reference.replayed == [None] * len(reference.replayed)


@pytest.mark.parametrize("parts", ["[attn,mlp]", "null", "[attn]", "[mlp]"])
def test_graphs_change_no_bit(parts: str, train: Train) -> None:
    """Of microbatches of two shapes in a step, beside one whose shape comes once."""
    outcome = train("qwen2", *UNFUSED, *captured(parts))
    assert outcome.replayed == EXPECTED
    assert_same(outcome, train("qwen2", *UNFUSED))


def test_graphs_of_mlps_over_packs_change_no_bit(train: Train) -> None:
    outcome = train("qwen2", *PACKED, *captured("[mlp]"), rows=EQUAL)
    assert outcome.replayed == EXPECTED_OF_EQUAL
    assert_same(outcome, train("qwen2", *PACKED, rows=EQUAL))


def test_graphs_of_attention_as_it_comes_change_next_to_nothing(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    any_kernel = (*COMMON, "attention_backend=auto")
    outcome, reference = train("qwen2", *any_kernel, *captured("null")), train("qwen2", *any_kernel)
    assert outcome.replayed == EXPECTED
    for found, expected in zip(outcome.metrics, reference.metrics, strict=True):
        assert found == pytest.approx(expected, rel=NEAR)


@pytest.mark.parametrize(
    ("parts", "modules"),
    [("[attn]", ("mlp_fc1", "mlp_act")), ("[mlp]", ("qkv_linear", "core_attn", "attn_proj"))],
)
def test_offloading_beside_graphs_changes_no_bit(parts: str, modules: tuple[str, ...], train: Train) -> None:
    outcome = train("qwen2", *UNFUSED, *captured(parts), *offload(modules))
    assert outcome.replayed == EXPECTED
    assert_same(outcome, train("qwen2", *UNFUSED))
    assert all(outcome.bytes_out[name] > 0 for name in modules)


@pytest.mark.parametrize(
    ("parts", "others"),
    [
        ("[moe_router]", ()),
        (ROUTED, ()),
        (ROUTED, offload(("expert_fc1", "moe_act"))),
        (ROUTED, (*offload(("expert_fc1", "moe_act")), "delay_offload_until_cuda_graph=true")),
    ],
)
def test_graphs_around_experts_change_no_bit(parts: str, others: tuple[str, ...], train: Train) -> None:
    """Two shapes by turns, whose numbers of tokens the dispatchers keep between a graph and the experts; and the
    balancing loss, which graphs add up."""
    outcome = train("qwen3_moe", *OF_EXPERTS, *captured(parts, *others))
    assert outcome.replayed == EXPECTED
    reference = train("qwen3_moe", *OF_EXPERTS)
    assert_same(outcome, reference)
    assert all(metrics["moe/load_balancing_loss"] > 0 for metrics in reference.metrics)
    if others:
        assert all(outcome.bytes_out[name] > 0 for name in ("expert_fc1", "moe_act"))


def test_weights_at_other_addresses_are_read_there(train: Train) -> None:
    outcome = train("qwen2", *UNFUSED, *captured("null"), moves_at=5)
    assert outcome.replayed == EXPECTED
    assert_same(outcome, train("qwen2", *UNFUSED), were_moved=True)


def test_gradients_that_lose_their_memory_between_steps_change_no_bit(train: Train) -> None:
    """As workers free it (`empty_unused_memory_level`)."""
    outcome = train("qwen2", *UNFUSED, *captured("null"), frees_gradients=True)
    assert outcome.replayed == EXPECTED
    assert_same(outcome, train("qwen2", *UNFUSED))


def test_random_states_are_written_as_without_graphs() -> None:
    """The tracker that a capture can read holds generators, which no checkpoint takes."""
    init_process_groups(make_policy(*UNFUSED, *captured("null")), seed=1)

    def draw() -> Tensor:
        with get_cuda_rng_tracker().fork():
            return torch.rand(4, device="cuda")

    draw()
    state = distributed._random_state().data
    assert {type(each) for each in state["tracker"].values()} == {Tensor}
    expected = draw()
    assert not torch.equal(draw(), expected)
    distributed._restore_random_state(state)
    assert torch.equal(draw(), expected)


def test_a_run_goes_on_from_a_checkpoint_of_captured_layers(
    train: Train, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    policy = make_policy(*UNFUSED, *captured("null"))
    init_process_groups(policy, seed=1)
    heads, loss = LogitsHeadFactory(1.0), build_loss("nll", {})
    folder = model_folder("qwen2", **SHAPES["qwen2"])
    found: list[dict[str, float]] = []
    for first, last in (0, 4), (4, len(ROWS)):
        model = build_model(policy, folder, num_steps=20)
        if first:
            distributed.load(model, tmp_path)
        for step in range(first, last):
            batch = make_rows(step, ROWS[step])
            found.append(train_step(model, batch, loss, normalizers(batch), MICRO_BATCH_SIZE, heads))
        assert model.graphs is not None
        if not first:
            distributed.save(model, tmp_path)
        model.graphs.clear()
    assert [metrics.pop(REPLAYED) for metrics in found] == [0, 0, 3, 3, 0, 0, 3, 3]
    assert found == train("qwen2", *UNFUSED).metrics
