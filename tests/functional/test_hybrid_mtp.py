"""The layers that predict further tokens in a hybrid model, compared with transformers' layers of the same weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_work
import torch
import torch.nn.functional as F
from models import make_batch, make_policy, offload, read_model, same_tensors, write_model
from ranks import Ranks, relative_error
from safetensors.torch import load_file, save_file
from test_parallel_layouts import LAYOUTS, MODULES, SETTINGS, SGD, STEPS, TOLERANCE, assert_same_bits
from test_resharding import SETTINGS as ADAM
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import build_model, export_hf

FAMILY, PATTERN = "nemotron_h_mtp", "*E-"
WEIGHT = 0.3  # Megatron-Bridge's for the family
REPEATED = ("mtp_num_layers=3", "mtp_use_repeated_layer=true")
STEP = ((0, 6),)


def drafting_model(folder: Path, copy: Path) -> Any:
    """A transformers model of the layers behind the projection, whose last norm is theirs."""
    weights = load_file(folder / "model.safetensors")
    moved = {"backbone.norm_f.weight": weights[f"mtp.layers.{len(PATTERN) - 1}.final_layernorm.weight"]}
    for name, weight in weights.items():
        if name.startswith("mtp.") and not any(each in name for each in ("enorm", "hnorm", "eh_proj", "final")):
            moved[name.replace("mtp.", "backbone.")] = weight
        elif name in ("backbone.embedding.weight", "lm_head.weight"):
            moved[name] = weight
    copy.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config |= {"layers_block_type": config["mtp_layers_block_type"], "num_hidden_layers": len(PATTERN)}
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    save_file(moved, copy / "model.safetensors", metadata={"format": "pt"})
    return read_model(copy, FAMILY)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Of any shape, over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def gradients_of(model: Any, *, begin: str) -> dict[str, np.ndarray[Any, Any]]:
    """By the folder's names, which has each expert's weights apart."""
    found = {}
    for name, weight in model.named_parameters():
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        name = name.replace("model.", begin, 1)
        if ".experts." in name:
            before, _, last = name.rpartition(".")
            found |= {f"{before}.{number}.{last}.weight": each.numpy() for number, each in enumerate(grad)}
        else:
            found[name.replace(".embeddings.", ".embedding.")] = grad.numpy()
    return found


def expected(folder: Path, copy: Path, *, depths: int, detached: bool = False) -> tuple[float, Mapping[str, Any]]:
    """The main loss, and gradients of it with what the further tokens add."""
    model, drafting = read_model(folder, FAMILY), drafting_model(folder, copy)
    weights = load_file(folder / "model.safetensors")
    enorm, hnorm, projection = (
        weights[f"mtp.layers.0.{name}.weight"].requires_grad_() for name in ("enorm", "hnorm", "eh_proj")
    )
    epsilon, batch, main, further = model.config.layer_norm_epsilon, make_batch(*STEP[0]), [], []
    for start in range(0, 6, 2):
        ids, lengths = (batch[name][start : start + 2] for name in ("input_ids", "input_lengths"))
        is_real = torch.arange(ids.shape[1]) < lengths[:, None]
        states = model.model(ids, use_cache=False).last_hidden_state
        main.append(
            F.cross_entropy(model.lm_head(states[:, :-1])[is_real[:, 1:]], ids[:, 1:][is_real[:, 1:]], reduction="sum")
        )
        table, head = model.model.embeddings.weight, model.lm_head.weight
        if detached:
            states, table, head = states.detach(), table.detach(), head.detach()
        for depth in range(1, depths + 1):
            embedded = F.embedding(F.pad(ids[:, depth:], (0, depth)), table)
            both = torch.cat([rms_norm(embedded, enorm, epsilon), rms_norm(states, hnorm, epsilon)], dim=-1)
            states = drafting.model(inputs_embeds=both @ projection.T, use_cache=False).last_hidden_state
            counts, labels = is_real[:, depth + 1 :], ids[:, depth + 1 :]
            logits = states[:, : -depth - 1] @ head.T
            further.append(F.cross_entropy(logits[counts], labels[counts]) / depths)
    loss = sum(main) / batch["token_mask"][:, 1:].sum()
    (loss + WEIGHT * sum(further) / 3).backward()
    gradients = gradients_of(model, begin="backbone.")
    of_drafts = gradients_of(drafting, begin="mtp.")
    gradients |= {name: grad for name, grad in of_drafts.items() if name.startswith("mtp.layers.")}
    gradients[f"mtp.layers.{len(PATTERN) - 1}.final_layernorm.weight"] = of_drafts["mtp.norm_f.weight"]
    for name, weight in (("enorm", enorm), ("hnorm", hnorm), ("eh_proj", projection)):
        gradients[f"mtp.layers.0.{name}.weight"] = weight.grad.numpy()
    return float(loss.detach()), gradients


@pytest.mark.usefixtures("megatron_process_group")
class TestOneRank:
    @pytest.mark.slow
    @pytest.mark.parametrize("head", ["use_fused_linear_logprobs=true", "use_fused_linear_logprobs=false"])
    @pytest.mark.parametrize(
        ("keys", "how"),
        [
            ((), {"depths": 1}),
            (REPEATED, {"depths": 3}),
            ((*REPEATED, "mtp_detach_heads=true"), {"depths": 3, "detached": True}),
        ],
        ids=["one", "repeated", "detached"],
    )
    def test_gradients_are_those_of_transformers_layers(
        self, keys: tuple[str, ...], how: dict[str, Any], head: str, tmp_path: Path
    ) -> None:
        folder = write_model(FAMILY, tmp_path / "model")
        loss, gradients = expected(folder, tmp_path / "drafting", **how)
        outcome = rank_work.train(folder, (*SGD, *keys, head), STEP)
        assert outcome.metrics[0]["loss"] == pytest.approx(loss, rel=1e-5)
        own = {name: each for name, each in outcome.gradients.items() if "e_score_correction_bias" not in name}
        assert relative_error(own, dict(gradients)) < 2e-5

    def test_an_export_is_the_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder, exported = write_model(FAMILY, tmp_path / "model"), tmp_path / "exported"
        export_hf(build_model(make_policy(*REPEATED), folder, num_steps=None), folder, exported)
        assert same_tensors(*(load_file(path / "model.safetensors") for path in (folder, exported)))
        assert "Unrecognized" not in capsys.readouterr().out, "what Bridge prints of its own table"
        for name in ("num_nextn_predict_layers", "mtp_layers_block_type"):
            assert (
                json.loads((exported / "config.json").read_text())[name]
                == json.loads((folder / "config.json").read_text())[name]
            )

    @pytest.mark.parametrize(
        ("drop", "add", "words"),
        [
            (
                "mtp.layers.1.",
                None,
                r"weights are not in the folder: mtp\.layers\.1\..* Set policy.megatron_cfg.mtp_num",
            ),
            (None, "mtp.layers.3.norm.weight", r"1 weights of the folder are no part of the model .*: mtp\.layers\.3"),
        ],
    )
    def test_other_weights_are_refused(self, drop: str | None, add: str | None, words: str, tmp_path: Path) -> None:
        folder = write_model(FAMILY, tmp_path)
        weights = load_file(folder / "model.safetensors")
        kept = {name: each for name, each in weights.items() if drop is None or not name.startswith(drop)}
        kept |= {} if add is None else {add: torch.ones(32)}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=words):
            build_model(make_policy(), folder, num_steps=None)
        build_model(make_policy("mtp_num_layers=0"), folder, num_steps=None)

    @pytest.mark.slow
    def test_it_samples_as_without_them(self, tmp_path: Path) -> None:
        folder, prompts = write_model(FAMILY, tmp_path), [[5, 9, 2], [7], [3, 4]]
        expected = rank_work.sample(folder, (*SGD, "mtp_num_layers=0"), prompts)
        assert rank_work.sample(folder, (*SGD, *REPEATED), prompts) == expected

    @pytest.mark.slow
    def test_balancing_losses_are_means_over_layers_with_experts(self, tmp_path: Path) -> None:
        """Megatron divides what a repeated layer adds by how often it is used."""
        folder = write_model(FAMILY, tmp_path)
        balanced = (*SGD, "moe_aux_loss_coeff=0.01", "moe_per_layer_logging=true", *REPEATED)
        (metrics,) = rank_work.train(folder, balanced, STEP).metrics
        of_layers = [value for name, value in metrics.items() if "_layer_" in name]
        assert sum(value > 0 for value in of_layers) == 3
        assert metrics["moe/seq_load_balancing_loss"] == pytest.approx(sum(of_layers) / 3)

    @pytest.mark.slow
    @pytest.mark.parametrize("setting", ["plain", "bfloat16", "recompute_full", "recompute_core_attn"])
    def test_offloading_changes_no_bit(self, setting: str, tmp_path: Path) -> None:
        folder = write_model(FAMILY, tmp_path)
        modules = ("attn_norm",) if setting == "recompute_full" else MODULES[FAMILY]
        expected, moved = (
            rank_work.train(folder, (*SGD, *REPEATED, *SETTINGS[setting], *keys), STEPS)
            for keys in ((), offload(modules))
        )
        assert_same_bits([moved], [expected])
        assert sum(moved.bytes_out.values()) > 0

    @pytest.mark.slow
    def test_recomputing_and_packs_change_no_gradient(self, tmp_path: Path) -> None:
        folder = write_model(FAMILY, tmp_path)
        expected = rank_work.train(folder, (*SGD, *REPEATED), STEP)
        for setting in ("recompute_full", "recompute_mlps", "packed_rows"):
            how = {"packs_rows": True} if setting == "packed_rows" else {}
            outcome = rank_work.train(folder, (*SGD, *REPEATED, *SETTINGS[setting]), STEP, **how)
            assert relative_error(outcome.gradients, expected.gradients) < TOLERANCE, setting


@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = ranks(1).run("write", FAMILY, tmp_path_factory.mktemp("model"))
    return path  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        *(LAYOUTS[name][1] for name in ("tp2-sp", "pp2", "tp2-sp-ep2")),
        (*LAYOUTS["pp2"][1], 'pipeline_model_parallel_layout="Et*5|t*3mmmL"'),
    ],
    ids=["tp2-sp", "pp2", "tp2-sp-ep2", "pp2-stages"],
)
def test_a_layout_trains_as_one_rank_does(layout: tuple[str, ...], ranks: Callable[[int], Ranks], folder: Path) -> None:
    keys = (*SGD, *REPEATED, "mtp_detach_heads=true")
    (one,) = ranks(1).run("train", folder, keys, STEPS)
    outcomes = ranks(2).run("train", folder, (*keys, *layout), STEPS)
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    assert relative_error(outcomes[0].gradients, one.gradients) < TOLERANCE
    assert relative_error(outcomes[0].weights, one.weights) < TOLERANCE
    moved = ranks(2).run("train", folder, (*keys, *layout, *offload(MODULES[FAMILY])), STEPS)
    assert_same_bits(moved, outcomes)
    assert all(sum(outcome.bytes_out.values()) > 0 for outcome in moved)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout(ranks: Callable[[int], Ranks], folder: Path, tmp_path: Path) -> None:
    adam = (*ADAM, *REPEATED, "moe_router_bias_update_rate=0", "optimizer.use_distributed_optimizer=true")
    expected = ranks(2).run("train_and_save", folder, (*adam, *LAYOUTS["pp2"][1]), tmp_path)
    manifest = {name: digest for rank in expected for name, digest in rank.manifest.items()}
    same = ranks(2).run("load_and_train", folder, (*adam, *LAYOUTS["pp2"][1]), tmp_path, manifest)
    assert [rank.digest for rank in same] == [rank.digest for rank in expected]
    for other in ranks(2).run("load_and_train", folder, (*adam, *LAYOUTS["tp2-sp-ep2"][1]), tmp_path, manifest)[:1]:
        assert other.weights.keys() == expected[0].weights.keys()
        assert relative_error(other.weights, expected[0].weights) < 1e-4


@pytest.mark.slow
def test_weights_arrive_by_the_folders_names(ranks: Callable[[int], Ranks], folder: Path) -> None:
    sent = ranks(2).run("train_and_hand_over", folder, (*REPEATED, *LAYOUTS["pp2"][1]))
    buckets, expected = sent[0]
    assert expected.keys() == load_file(folder / "model.safetensors").keys()
    (received,) = ranks(1).run("take_over", folder, REPEATED, buckets)
    assert received.keys() == expected.keys()
    for name, (dtype, data) in expected.items():
        assert received[name][0] == dtype
        assert np.array_equal(received[name][1], data), name
