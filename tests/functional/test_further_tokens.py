"""Layers that predict further tokens: left out, trained, and weighed as the keys say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import make_policy, read_model, same_tensors, take_step, weights_of, write_model
from ranks import Ranks, relative_error
from safetensors.torch import load_file, save_file
from test_parallel_layouts import LAYOUTS, MODULES, SGD, STEPS, TOLERANCE, assert_same_bits
from test_resharding import SETTINGS as ADAM
from torch import Tensor

from nemo_rl_offload.megatron.build.model import build_model, export_hf
from nemo_rl_offload.megatron.checkpoint.distributed import load_weights, save

FAMILY = "deepseek_v3_mtp"
WITHOUT = "mtp_num_layers=0"


def made_without(folder: Path, copy: Path) -> Path:
    """The same model, in whose folder nothing speaks of such layers."""
    write_model(FAMILY, copy)
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"]
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith(f"model.layers.{last}.")}
    assert len(kept) < len(weights)
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.usefixtures("megatron_process_group")
class TestOneRank:
    def trained(self, folder: Path, *overrides: str) -> tuple[Any, list[dict[str, float]]]:
        torch.manual_seed(1)
        model = build_model(make_policy(*SGD, *overrides), folder, num_steps=2)
        return model, [take_step(model, step) for step in range(2)]

    def update(self, folder: Path, *overrides: str) -> dict[str, Tensor]:
        """What the first step of plain SGD adds to each of the model's own weights."""
        before = weights_of(build_model(make_policy(*SGD, *overrides), folder, num_steps=1))
        model = build_model(make_policy(*SGD, *overrides), folder, num_steps=1)
        take_step(model, 0)
        after = weights_of(model)
        return {name: after[name] - before[name] for name in before if ".mtp." not in name}

    @pytest.mark.slow
    def test_0_is_the_model_made_without_them(self, tmp_path: Path) -> None:
        folder = write_model(FAMILY, tmp_path / "with")
        other = made_without(folder, tmp_path / "without")
        model, metrics = self.trained(folder, WITHOUT)
        expected, expected_metrics = self.trained(other)
        assert metrics == expected_metrics
        assert same_tensors(weights_of(model), weights_of(expected))
        exported = tmp_path / "exported"
        export_hf(model, folder, exported)
        export_hf(expected, other, tmp_path / "expected")
        assert same_tensors(*(load_file(path / "model.safetensors") for path in (exported, tmp_path / "expected")))
        assert json.loads((exported / "config.json").read_text())["num_nextn_predict_layers"] == 0
        assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
        ids = torch.arange(7)[None]
        with torch.no_grad():
            assert torch.equal(
                read_model(exported, FAMILY)(ids).logits, read_model(tmp_path / "expected", FAMILY)(ids).logits
            )
        again, _ = self.trained(exported)
        assert not any(".mtp." in name for name in weights_of(again))

    @pytest.mark.slow
    @pytest.mark.sampled
    def test_all_of_them_are_trained_as_without_the_key(self, tmp_path: Path) -> None:
        folder = write_model(FAMILY, tmp_path / "with")
        (model, metrics), (expected, expected_metrics) = self.trained(folder, "mtp_num_layers=1"), self.trained(folder)
        assert metrics == expected_metrics
        assert same_tensors(weights_of(model), weights_of(expected))
        before = weights_of(build_model(make_policy(), folder, num_steps=None))
        assert all(not torch.equal(value, before[name]) for name, value in weights_of(model).items() if "enorm" in name)

    def test_weights_of_a_checkpoint_with_them_are_read_without(self, tmp_path: Path) -> None:
        folder = write_model(FAMILY, tmp_path / "with")
        model, _ = self.trained(folder)
        (tmp_path / "saved").mkdir()
        save(model, tmp_path / "saved")
        other = build_model(make_policy(*SGD, WITHOUT), folder, num_steps=2)
        load_weights(other, tmp_path / "saved")
        expected = {name: value for name, value in weights_of(model).items() if ".mtp." not in name}
        assert same_tensors(weights_of(other), expected)

    @pytest.mark.slow
    def test_their_loss_is_weighed_and_kept_from_the_model(self, tmp_path: Path) -> None:
        """Without clipping, an update of plain SGD is linear in the weight of a loss."""
        folder = write_model(FAMILY, tmp_path / "with")
        without, none, once, twice, detached = (
            self.update(folder, *keys)
            for keys in (
                (WITHOUT,),
                ("mtp_loss_scaling_factor=0",),
                (),
                ("mtp_loss_scaling_factor=0.2",),
                ("mtp_loss_scaling_factor=0.2", "mtp_detach_heads=true"),
            )
        )
        assert without.keys() == none.keys() == detached.keys()
        largest = 0.0
        for name, plain in without.items():
            torch.testing.assert_close(none[name], plain, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(twice[name] - plain, 2 * (once[name] - plain), rtol=1e-3, atol=2e-7)
            largest = max(largest, float((once[name] - plain).abs().max()))
            if ".layers." in name:
                torch.testing.assert_close(detached[name], plain, rtol=1e-5, atol=1e-8)
        assert largest > 1e-4


@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = ranks(1).run("write", FAMILY, tmp_path_factory.mktemp("model"))
    return path  # type: ignore[no-any-return]


@pytest.mark.sampled
@pytest.mark.slow
def test_layouts_without_them_train_as_one_rank_does(ranks: Callable[[int], Ranks], folder: Path) -> None:
    """Offloading changes no bit. Without their loss, of each microbatch alone, packs may be cut in any way."""
    packs = (".sequence_packing.enabled=true", ".sequence_packing.train_mb_tokens=40")
    (one,) = ranks(1).run("train", folder, (*SGD, WITHOUT), STEPS)
    assert not any("mtp" in name or "layers.4" in name for name in one.weights)
    stages = 'pipeline_model_parallel_layout="Ettt|tL"'
    for overrides in ((*LAYOUTS["pp2"][1], stages, *packs), (*LAYOUTS["cp2"][1], *packs)):
        outcomes = ranks(2).run("train", folder, (*SGD, WITHOUT, *overrides), STEPS)
        for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
            assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
        assert relative_error(outcomes[0].gradients, one.gradients) < TOLERANCE
        assert relative_error(outcomes[0].weights, one.weights) < TOLERANCE
        offloaded = ("fine_grained_activation_offloading=true", f"offload_modules=[{','.join(MODULES[FAMILY])}]")
        moved = ranks(2).run("train", folder, (*SGD, WITHOUT, *overrides, *offloaded), STEPS)
        assert_same_bits(moved, outcomes)
        assert all(sum(outcome.bytes_out.values()) > 0 for outcome in moved)


@pytest.mark.slow
def test_a_checkpoint_without_them_goes_on_in_another_layout(
    ranks: Callable[[int], Ranks], folder: Path, tmp_path: Path
) -> None:
    adam = (*ADAM, WITHOUT, "moe_router_bias_update_rate=0", "optimizer.use_distributed_optimizer=true")
    expected = ranks(2).run("train_and_save", folder, (*adam, *LAYOUTS["pp2"][1]), tmp_path)
    manifest = {name: digest for rank in expected for name, digest in rank.manifest.items()}
    same = ranks(2).run("load_and_train", folder, (*adam, *LAYOUTS["pp2"][1]), tmp_path, manifest)
    assert [rank.digest for rank in same] == [rank.digest for rank in expected]
    (other,) = ranks(1).run("load_and_train", folder, adam, tmp_path, manifest)
    assert other.weights.keys() == expected[0].weights.keys()
    assert relative_error(other.weights, expected[0].weights) < 1e-4


@pytest.mark.slow
def test_weights_arrive_without_them(ranks: Callable[[int], Ranks], folder: Path) -> None:
    sent = ranks(2).run("train_and_hand_over", folder, (WITHOUT, *LAYOUTS["pp2"][1]))
    buckets, expected = sent[0]
    (received,) = ranks(1).run("take_over", folder, (WITHOUT,), buckets)
    assert received.keys() == expected.keys()
    assert not any("layers.4." in name for name in received)
    for name, (dtype, data) in expected.items():
        assert received[name][0] == dtype
        assert np.array_equal(received[name][1], data), name
