"""Routers that replay given experts: as transformers forced to them, whatever the layout, the cut and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from models import make_batch, read_model
from ranks import Ranks, relative_error
from safetensors.torch import load_file
from test_parallel_layouts import LAYOUTS, MODULES, SETTINGS, SGD, TOLERANCE, assert_same_bits, share_each_batch
from torch import Tensor

if TYPE_CHECKING:
    from rank_work import Outcome

MIXED, LATENT = "qwen3_moe_mixed", "deepseek_v3"
STEPS = ((0, 8), (1, 18))
MOE_RECOMPUTED = ("recompute_granularity=selective", "recompute_modules=[moe]")
Train = Callable[..., "list[Outcome]"]


@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model of four layers, of which one is dense."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            (folders[family],) = ranks(1).run("write", family, tmp_path_factory.mktemp(family))
        return folders[family]

    return folder_of


@pytest.fixture(scope="module")
def train(ranks: Callable[[int], Ranks], folder: Callable[[str], Path]) -> Train:
    """Steps in a layout, each combination once; the outcomes of all ranks."""
    outcomes: dict[tuple[Any, ...], list[Outcome]] = {}

    def train_in(family: str, layout: str, *overrides: str, replays: bool | str = True) -> list[Outcome]:
        key = (family, layout, overrides, replays)
        if key not in outcomes:
            num_ranks, settings = LAYOUTS[layout]
            arguments = (folder(family), (*SGD, *settings, *overrides), STEPS)
            outcomes[key] = ranks(num_ranks).run("train", *arguments, replays=replays)
        return outcomes[key]

    return train_in


def assert_close(outcomes: list[Outcome], one: Outcome) -> None:
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    assert relative_error(outcomes[0].gradients, one.gradients) < TOLERANCE
    assert relative_error(outcomes[0].weights, one.weights) < TOLERANCE


def force(model: Any, family: str, routes_TLK: Tensor) -> None:
    """Let transformers' routers take these experts for the next tokens, and their own where there is none."""
    layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]

    def chosen(own_TK: Tensor, place: int) -> Tensor:
        routes_TK = routes_TLK[:, place].long()
        return torch.where(routes_TK < 0, own_TK, routes_TK)

    for place, mlp in enumerate(layers):
        if family == LATENT:
            own = type(mlp).route_tokens_to_experts

            def weigh(logits: Tensor, place: int = place, mlp: Any = mlp, own: Any = own) -> tuple[Tensor, Tensor]:
                experts = chosen(own(mlp, logits.detach())[0], place)
                weights = logits.sigmoid().gather(1, experts)
                return experts, weights / weights.sum(-1, keepdim=True) * mlp.routed_scaling_factor

            mlp.route_tokens_to_experts = weigh
        else:

            def choose(hidden: Tensor, place: int = place, gate: Any = mlp.gate) -> tuple[Tensor, Tensor, Tensor]:
                logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
                scores = logits.softmax(-1)
                experts = chosen(scores.topk(gate.top_k)[1], place)
                weights = scores.gather(1, experts)
                return logits, weights / weights.sum(-1, keepdim=True), experts

            mlp.gate.forward = choose


def forced(folder: Path, family: str, batch: dict[str, Tensor], scratch: Path) -> tuple[float, dict[str, Any]]:
    """Loss and gradients, by the names of the folder, of transformers whose routers take the batch's experts."""
    model = read_model(folder, family)
    total, num_tokens = 0.0, int((batch["input_lengths"] - 1).sum())
    for ids, length, routes in zip(batch["input_ids"], batch["input_lengths"], batch["routed_experts"], strict=True):
        force(model, family, routes[:length])
        logits = model(ids[None, :length]).logits[0, :-1]
        loss = F.cross_entropy(logits, ids[1:length], reduction="sum") / num_tokens
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(scratch)
    return total, {name: gradient.numpy() for name, gradient in load_file(scratch / "model.safetensors").items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", [MIXED, pytest.param(LATENT, marks=pytest.mark.slow)])
def test_replaying_is_transformers_with_these_experts(
    family: str, ranks: Callable[[int], Ranks], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (outcome,) = ranks(1).run("train", folder(family), SGD, STEPS[:1], replays=True)
    ((routes, num_experts),) = ranks(1).run("routes_of", folder(family), SGD, STEPS[0])
    assert routes.max() == num_experts - 1
    batch = make_batch(*STEPS[0]) | {"routed_experts": torch.from_numpy(routes)}
    loss, gradients = forced(folder(family), family, batch, tmp_path)
    assert outcome.metrics[0]["loss"] == pytest.approx(loss, rel=1e-6)
    trained = {name: each for name, each in outcome.gradients.items() if "correction_bias" not in name}
    gradients = {name: gradients[name] for name in trained}
    assert relative_error(trained, gradients) < 1e-5
    of_routers = [name for name in gradients if name.endswith("mlp.gate.weight")]
    assert len(of_routers) == 3
    for name in of_routers:
        assert relative_error({name: outcome.gradients[name]}, {name: gradients[name]}) < 1e-4
    routes[:, :-1] = routes[:, 1:].copy()  # of the next token
    _, moved = forced(folder(family), family, batch, tmp_path)
    error = relative_error(trained, {name: moved[name] for name in trained})
    assert error > 0.1, "the comparison sees routes of other tokens"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), MOE_RECOMPUTED], ids=["plain", "recomputed"])
def test_a_model_that_replays_its_own_choice_trains_bit_for_bit_as_without(
    overrides: tuple[str, ...], train: Train
) -> None:
    (own,), (none,) = train(MIXED, "one", *overrides, replays="own"), train(MIXED, "one", *overrides, replays=False)
    assert own.metrics == none.metrics
    assert own.digests == none.digests
    (other,) = train(MIXED, "one")
    assert other.digests[0] != none.digests[0], "other experts are seen"


CASES = [
    *((MIXED, layout, "plain") for layout in ("pp2-vpp2", "tp2-sp", "pp2", "ep2", "dp2", "cp2", "tp2-sp-ep2")),
    *((MIXED, layout, "sequence_packing") for layout in ("one", "tp2-sp", "pp2", "pp2-vpp2", "ep2", "cp2")),
    *((MIXED, layout, "dynamic_batching") for layout in ("pp2-vpp2", "dp2")),
    *((MIXED, layout, "recompute_full") for layout in ("one", "pp2-vpp2", "cp2")),
    *((MIXED, layout, "recompute_moe") for layout in ("one", "pp2", "pp2-vpp2")),
    *((MIXED, layout, "sequence_packing") for layout in ("cp2-tp2-sp", "pp2-cp2")),
    *((LATENT, layout, "plain") for layout in ("tp2-sp", "pp2-vpp2")),
    *((MIXED, layout, "plain") for layout in ("ep2-allgather", "tp2-sp-etp2")),
]
HERE = SETTINGS | {"recompute_moe": MOE_RECOMPUTED}


@pytest.mark.parametrize(
    ("family", "layout", "setting"),
    [CASES[0], *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.sampled]) for case in CASES[1:])],
)
def test_a_layout_replays_as_one_rank_does(family: str, layout: str, setting: str, train: Train) -> None:
    (one,), outcomes = train(family, "one"), train(family, layout, *HERE[setting])
    assert_close(outcomes, one)
    if share_each_batch(layout):
        assert outcomes[-1].logprobs == pytest.approx(one.logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("layout", "setting"),
    [
        *((layout, "plain") for layout in ("one", "tp2-sp", "pp2-vpp2", "ep2")),
        *(("one", setting) for setting in ("sequence_packing", "recompute_moe")),
        *(("cp2", setting) for setting in ("sequence_packing", "recompute_core_attn")),
    ],
)
def test_offloading_changes_no_bit(layout: str, setting: str, train: Train) -> None:
    modules = MODULES["qwen3_moe"]
    if setting == "recompute_moe":
        modules = tuple(name for name in modules if "expert" not in name and name != "moe_act")
    listed = ("fine_grained_activation_offloading=true", f"offload_modules=[{','.join(modules)}]")
    outcomes = train(MIXED, layout, *HERE[setting], *listed)
    assert_same_bits(outcomes, train(MIXED, layout, *HERE[setting]))
    assert all(sum(outcome.bytes_out.values()) > 0 for outcome in outcomes)
