"""LoRA: every layout trains as one rank does, one rank as peft does, and what leaves a run has the same function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from models import make_batch, make_policy, read_model
from ranks import Ranks, relative_error
from test_parallel_layouts import LAYOUTS, MODULES, SETTINGS, SGD, STEPS, TOLERANCE, assert_same_bits
from test_resharding import SETTINGS as RESHARDED
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.planner.cost.memory import stage_adapters
from nemo_rl_offload.specs.lora import Adapters
from nemo_rl_offload.specs.model_shape import parse_model_shape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout, stage_layers

if TYPE_CHECKING:
    from rank_work import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.sampled]

ADAM = (*RESHARDED, "optimizer.use_distributed_optimizer=true")
ON = ("peft.enabled=true", "peft.dim=4", "peft.alpha=8")
FUSED = (*ON, "peft.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]")
ATTENTION = (*ON, "peft.target_modules=[linear_qkv,linear_proj]")
EACH = (*ON, "peft.target_modules=[linear_q,linear_k,linear_v,linear_proj,linear_fc1_gate,linear_fc1_up,linear_fc2]")
HEAD = (*EACH[:-1], EACH[-1].replace("]", ",output_layer]"))
MIXERS = (
    *(*ON, "peft.share_expert_adapters=false"),
    "peft.target_modules=[in_proj,out_proj,linear_q,linear_k,linear_v,linear_proj,linear_fc1,output_layer]",
)
FOR_PEFT = (*ON, 'peft.target_modules=[in_proj,linear_q,linear_k,linear_v,linear_proj,"*.mlp.linear_fc1",output_layer]')
OWN = (*FUSED, "peft.share_expert_adapters=false")
HEAD_ALONE = (*ON, "peft.target_modules=[output_layer]")
UNFUSED = (*ON, "peft.target_modules=[linear_proj,linear_fc2]")
HEAD_AND_SOME = (*ON, "peft.target_modules=[linear_proj,linear_fc2,output_layer]")
SOME = (*ON, 'peft.target_modules=["*.layers.1.*.linear_qkv","*.layers.3.*.linear_fc1","*.layers.0.*.linear_fc2"]')
CASES = [
    *(("llama", layout, FUSED) for layout in ("tp2-sp", "pp2", "cp2", "dp2")),
    *(("llama", layout, EACH) for layout in ("tp2-sp", "pp2-vpp2")),
    *(("llama", layout, SOME) for layout in ("pp2", "pp2-vpp2")),
    *(("qwen2", layout, FUSED) for layout in ("pp2",)),
    *(("qwen3_moe", layout, FUSED) for layout in ("ep2", "tp2-sp", "tp2-sp-ep2", "pp2")),
    *(("qwen3_moe", layout, OWN) for layout in ("ep2", "tp2-sp", "tp2-sp-ep2", "pp2", "dp2")),
    *(("deepseek_v3_mtp", layout, UNFUSED) for layout in ("pp2",)),
    *(("llama", layout, HEAD) for layout in ("tp2-sp", "pp2", "cp2")),
    *(("nemotron_h", layout, MIXERS) for layout in ("tp2-sp-ep2", "pp2-vpp2")),
    *(("qwen3_moe", layout, ATTENTION) for layout in ("etp2",)),
    *(("llama", "tp2", HEAD_ALONE), ("deepseek_v3_mtp", "pp2-stages", HEAD_AND_SOME)),
]
Train = Callable[..., "list[Outcome]"]


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], Ranks]) -> Callable[..., list[Any]]:
    def on_ranks(layout: str, function: str, *args: Any, **how: Any) -> list[Any]:
        return ranks(LAYOUTS[layout][0]).run(function, *args, **how)

    return on_ranks


@pytest.fixture(scope="module")
def folder(run: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
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

    def train_in(family: str, layout: str, peft: tuple[str, ...], *settings: str) -> list[Outcome]:
        key = (family, layout, peft, settings)
        if key not in outcomes:
            overrides = (*SGD, *LAYOUTS[layout][1], *peft, *settings)
            outcomes[key] = run(layout, "train", folder(family), overrides, STEPS)
        return outcomes[key]

    return train_in


def offloaded(family: str) -> tuple[str, ...]:
    return "fine_grained_activation_offloading=true", f"offload_modules=[{','.join(MODULES[family])}]"


def assert_alike(outcomes: list[Outcome], one: Outcome) -> None:
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    assert relative_error(outcomes[0].gradients, one.gradients) < TOLERANCE
    assert relative_error(outcomes[0].weights, one.weights) < TOLERANCE


@pytest.mark.parametrize(("family", "layout", "peft"), CASES)
def test_a_layout_trains_adapters_as_one_rank_does(
    family: str, layout: str, peft: tuple[str, ...], train: Train
) -> None:
    (one,), outcomes = train(family, "one", peft), train(family, layout, peft)
    assert any("lora_B" in name for name in one.gradients)
    assert all("lora" in name for name in one.gradients)
    assert any("lm_head" in name for name in one.gradients) == ("output_layer" in peft[-1])
    assert_alike(outcomes, one)
    assert_same_bits(train(family, layout, peft, *offloaded(family)), outcomes)


@pytest.mark.parametrize(
    ("family", "layout", "peft", "setting"),
    [
        *(("llama", "one", UNFUSED, setting) for setting in ("recompute_full", "recompute_mlps", "logits")),
        ("llama", "one", (*ON, "peft.target_modules=[linear_fc1]"), "recompute_mlps"),
        ("llama", "tp2-sp", EACH, "recompute_full"),
        ("llama", "cp2", FUSED, "sequence_packing"),
        ("qwen3_moe", "pp2", FUSED, "sequence_packing"),
        ("qwen3_moe", "ep2", FUSED, "recompute_full"),
        ("qwen2", "pp2", FUSED, "head_by_tokens"),
        *(("llama", layout, HEAD, "logits") for layout in ("one", "tp2-sp")),
        ("deepseek_v3_mtp", "tp2-sp", HEAD_AND_SOME, "logits"),
        ("llama", "pp2", HEAD, "head_by_tokens"),
        ("llama", "cp2", HEAD, "sequence_packing"),
    ],
)
def test_other_ways_train_the_same_adapters(
    family: str, layout: str, peft: tuple[str, ...], setting: str, train: Train
) -> None:
    assert_alike(train(family, layout, peft, *SETTINGS[setting]), train(family, "one", peft)[0])


def test_dropout_drops_the_same_with_and_without_offloading(train: Train) -> None:
    dropped = (*FUSED, "peft.dropout=0.3", "peft.dropout_position=pre")
    assert_same_bits(train("llama", "one", dropped, *offloaded("llama")), train("llama", "one", dropped))
    assert train("llama", "one", dropped)[0].metrics[1:] != train("llama", "one", FUSED)[0].metrics[1:]


@pytest.mark.parametrize(
    ("family", "layout", "peft"), [("llama", "pp2", FUSED), ("qwen3_moe", "ep2", FUSED), ("llama", "tp2", HEAD)]
)
def test_the_model_without_adapters_stays_as_it_is(
    family: str, layout: str, peft: tuple[str, ...], run: Callable[..., list[Any]], folder: Callable[[str], Path]
) -> None:
    for scored in run(layout, "score", folder(family), (*SGD, *LAYOUTS[layout][1], *peft)):
        assert scored.frozen == ""
        if scored.first is not None:
            assert (scored.without == scored.first).all()
            assert (scored.again == scored.trained).all()
            assert np.abs(scored.trained - scored.first).max() > 1e-3


@pytest.mark.parametrize(
    ("family", "written_in", "read_in", "peft"),
    [
        ("llama", "one", "one", FUSED),
        ("llama", "tp2", "pp2", EACH),
        ("llama", "pp2-vpp2", "tp2", FUSED),
        ("llama", "one", "one", HEAD),
        ("llama", "tp2", "pp2", HEAD),
        ("qwen3_moe", "ep2", "one", FUSED),
        ("qwen3_moe", "one", "ep2", FUSED),
        ("qwen3_moe", "ep2", "one", OWN),
        ("qwen3_moe", "one", "ep2", OWN),
        ("nemotron_h", "tp2-sp", "one", MIXERS),
        ("nemotron_h", "one", "tp2-sp", MIXERS),
    ],
)
def test_a_checkpoint_of_adapters_goes_on_in_another_layout(
    family: str,
    written_in: str,
    read_in: str,
    peft: tuple[str, ...],
    run: Callable[..., list[Any]],
    folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    model = folder(family)
    saved = run(written_in, "train_and_save", model, (*ADAM, *LAYOUTS[written_in][1], *peft), tmp_path)
    files = {name: digest for rank in saved for name, digest in rank.manifest.items()}
    resumed = run(read_in, "load_and_train", model, (*ADAM, *LAYOUTS[read_in][1], *peft), tmp_path, files)
    there = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    tensors = {name for name, about in there.items() if isinstance(about, TensorStorageMetadata)}
    assert tensors
    assert {name for name in tensors if ".adapter." not in name} == set()
    assert relative_error(resumed[0].at_checkpoint, saved[0].at_checkpoint) < 1e-7
    assert relative_error(resumed[0].weights, saved[0].weights) < 1e-4
    for metrics, expected in zip(resumed[-1].metrics, saved[-1].metrics, strict=True):
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    if written_in == read_in:
        assert [rank.digest for rank in resumed] == [rank.digest for rank in saved]


@pytest.mark.parametrize(("trained_in", "peft"), [("tp2", EACH), ("pp2", EACH), ("tp2", HEAD), ("pp2", HEAD)])
def test_workers_that_generate_get_merged_weights(
    trained_in: str, peft: tuple[str, ...], run: Callable[..., list[Any]], folder: Callable[[str], Path]
) -> None:
    handed = run(trained_in, "train_and_hand_over", folder("llama"), (*SGD, *LAYOUTS[trained_in][1], *peft))
    buckets, expected = handed[0]
    (taken,) = run("one", "take_over", folder("llama"), (*SGD, *peft), buckets)
    assert taken.keys() == expected.keys()
    for name, (dtype, data) in expected.items():
        assert (taken[name][1] == data).all(), name
        assert taken[name][0] == dtype


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
def test_a_model_with_an_adapted_output_layer_generates_what_its_export_does(
    layout: str, run: Callable[..., list[Any]], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts = [[3, 7, 11], [5], [9, 2, 4, 8, 1]]
    sampled = run(
        layout, "sample_trained", folder("llama"), (*SGD, *LAYOUTS[layout][1], *HEAD), prompts, tmp_path / "m"
    )
    assert sampled[0] == sampled[1]
    base, merged = read_model(folder("llama"), "llama"), read_model(tmp_path / "m", "llama")
    assert not torch.equal(base.lm_head.weight, merged.lm_head.weight)
    for prompt, response in zip(prompts, sampled[0], strict=True):
        with torch.no_grad():
            logits = merged(torch.tensor([[*prompt, *response.tokens]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == response.tokens
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(response.tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(response.logprobs), chosen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "layout", "peft"),
    [
        ("llama", "one", EACH),
        ("llama", "pp2", SOME),
        ("llama", "tp2", (*ON, "peft.target_modules=[linear_q,linear_v,linear_fc1]")),
        ("qwen3_moe", "ep2", FUSED),
        ("qwen3_moe", "ep2", OWN),
        ("deepseek_v3_mtp", "pp2", UNFUSED),
        ("llama", "pp2-tp2", HEAD),
        ("deepseek_v3_mtp", "pp2", HEAD_AND_SOME),
        ("nemotron_h", "tp2-sp", MIXERS),
    ],
)
def test_a_plan_counts_the_adapters_that_are_built(
    family: str, layout: str, peft: tuple[str, ...], run: Callable[..., list[Any]], folder: Callable[[str], Path]
) -> None:
    world_size, overrides = LAYOUTS[layout]
    sizes = dict(each.split("=") for each in overrides)
    ranks = ParallelLayout(
        world_size,
        int(sizes.get("tensor_model_parallel_size", 1)),
        int(sizes.get("pipeline_model_parallel_size", 1)),
        expert=int(sizes.get("expert_model_parallel_size", 1)),
    )
    shape = parse_model_shape(json.loads((folder(family) / "config.json").read_text())).shape
    section = make_policy(*peft)["megatron_cfg"]["peft"]
    adapters = Adapters(tuple(section["target_modules"]), (), section["dim"], section["share_expert_adapters"])
    counts = run(layout, "count_trained", folder(family), (*SGD, *overrides, *peft))
    for rank, chunks in enumerate(stage_layers(ranks, shape.num_layers)):
        planned = stage_adapters(shape, ranks, chunks, rank, adapters)
        assert counts[rank * (world_size // ranks.pipeline)] == (planned.expert, planned.shared)


STEPS_OF_PEFT, RATE = 20, 1e-2


@pytest.mark.parametrize(
    "peft", [EACH, UNFUSED, HEAD], ids=["each projection", "linear_proj and linear_fc2", "all linears"]
)
def test_trajectories_are_those_of_peft(
    peft: tuple[str, ...], run: Callable[..., list[Any]], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The same model, data, order, initial adapters and AdamW, in a plain loop of torch."""
    from peft import PeftModel

    rates = (f"optimizer.lr={RATE}", "optimizer.weight_decay=0.01", "scheduler.lr_warmup_iters=0")
    overrides = (*rates, "optimizer.clip_grad=0", *peft)
    (losses,) = run("one", "follow", folder("llama"), overrides, tmp_path, STEPS_OF_PEFT)
    model: Any = PeftModel.from_pretrained(read_model(folder("llama"), "llama"), tmp_path / "first", is_trainable=True)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
    for step, loss in enumerate(losses):
        batch = make_batch(step, 8)
        total = _nll(model, batch) / float(normalizers(batch).global_valid_tokens)
        assert float(total.detach()) == pytest.approx(loss, rel=1e-4), step
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    last: Any = PeftModel.from_pretrained(read_model(folder("llama"), "llama"), tmp_path / "last")
    expected = dict(model.named_parameters())
    for name, weight in last.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def _nll(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logprobs = model(batch["input_ids"]).logits.log_softmax(-1)[:, :-1]
    chosen = logprobs.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return -(chosen * batch["token_mask"][:, 1:]).sum()


@pytest.mark.parametrize(
    ("family", "layout", "peft"),
    [
        *(("llama", "tp2", HEAD), ("llama", "pp2", HEAD), ("llama", "one", HEAD_ALONE)),
        *(("llama", "tp2", FUSED), ("llama", "pp2", SOME), ("qwen2", "one", EACH), ("qwen3_moe", "ep2", FUSED)),
        *(("qwen3_moe", "ep2", OWN), ("gemma3_text", "tp2", FUSED), ("nemotron_h", "tp2-sp", FOR_PEFT)),
    ],
)
def test_an_exported_adapter_is_the_merged_model_in_peft(
    family: str,
    layout: str,
    peft: tuple[str, ...],
    run: Callable[..., list[Any]],
    folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from peft import PeftModel

    run(layout, "follow", folder(family), (*SGD, *LAYOUTS[layout][1], *peft), tmp_path, 3)
    settings = json.loads((tmp_path / "last/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (4, 8, str(folder(family)))
    tokens = make_batch(3, 4)["input_ids"]
    with torch.no_grad():
        base = read_model(folder(family), family)
        first = base(tokens).logits
        adapted: Any = PeftModel.from_pretrained(base, tmp_path / "last")
        found = adapted(tokens).logits
        merged = read_model(tmp_path / "merged", family)(tokens).logits
    torch.testing.assert_close(found, merged, rtol=1e-5, atol=2e-5)
    assert (found - first).abs().max() > 1e-2
