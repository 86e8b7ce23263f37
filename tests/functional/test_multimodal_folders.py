"""The text part of a multimodal folder trains as transformers' whole model does on text, and an export is the folder
with new weights of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_work
import torch
from models import FAMILIES, MICRO_BATCH_SIZE, make_batch, make_policy, same_tensors, take_step
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model, export_adapter, export_hf
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.specs.multimodal import module_name, text_name

pytestmark = pytest.mark.usefixtures("megatron_process_group")

Folder = Callable[[str], Path]
MULTIMODAL = ("gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "qwen3_5_moe")))
WEIGHTS = "model.safetensors"


def whole_model(folder: Path, family: str) -> Any:
    return FAMILIES[family][1].from_pretrained(folder, dtype=torch.float32).eval()


def is_vision(name: str) -> bool:
    return "vision" in name or "visual" in name or "projector" in name


def with_other_names(folder: Path, copy: Path) -> Path:
    """The same model by the names that transformers' modules have."""
    shutil.copytree(folder, copy)
    weights = load_file(folder / WEIGHTS)
    renamed = {
        f"model.{name.removeprefix('model.')}" if is_vision(name) else module_name(text_name(name)): weight
        for name, weight in weights.items()
    }
    packed = {name: weight.contiguous() for name, weight in with_packed_experts(renamed).items()}
    save_file(packed, copy / WEIGHTS, {"format": "pt"})
    return copy


def with_packed_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With one tensor of all experts of a layer, [E, out, in], as transformers' modules and public folders have it."""
    found = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for layer in sorted({name.partition(".experts.")[0] for name in weights.keys() - found.keys()}):
        num_experts = sum(name.startswith(f"{layer}.experts.") for name in weights) // 3
        gate, up, down = (
            torch.stack([weights[f"{layer}.experts.{number}.{kind}_proj.weight"] for number in range(num_experts)])
            for kind in ("gate", "up", "down")
        )
        found |= {f"{layer}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.experts.down_proj": down}
    return found


def logits_of(model: MegatronModel, ids: Tensor) -> Tensor:
    """[B, S, V] of `ids` [B, S]."""
    with torch.no_grad():
        return model.modules[0](ids, torch.arange(ids.shape[1]).expand_as(ids), None)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_loss_and_gradients_are_those_of_the_whole_model_on_text(model_folder: Folder, family: str) -> None:
    folder, batch = model_folder(family), make_batch(0)
    model = build_model(make_policy("optimizer.clip_grad=0", "moe_aux_loss_coeff=0"), folder, num_steps=10)
    reference = whole_model(folder, family)
    found = reference(batch["input_ids"]).logits
    torch.testing.assert_close(logits_of(model, batch["input_ids"]), found.detach(), rtol=1e-5, atol=1e-5)
    head = LogitsHeadFactory(1.0)
    metrics = train_step(model, batch, build_loss("nll", {}), normalizers(batch), MICRO_BATCH_SIZE, head)
    chosen = found.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    mask = batch["token_mask"][:, 1:]
    loss = -(chosen * mask).sum() / mask.sum()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    exported = rank_work._exported(model, gradients=True).items()
    gradients = with_packed_experts({module_name(name): torch.from_numpy(each) for name, each in exported})
    expected = {name: weight.grad for name, weight in reference.named_parameters() if weight.grad is not None}
    assert gradients.keys() == expected.keys() == {n for n, _ in reference.named_parameters() if not is_vision(n)}
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize("family", MULTIMODAL)
@pytest.mark.parametrize("has_other_names", [False, True])
def test_an_export_is_the_folder_with_new_weights_of_the_text_part(
    model_folder: Folder, family: str, has_other_names: bool, tmp_path: Path
) -> None:
    folder = model_folder(family)
    if has_other_names:
        folder = with_other_names(folder, tmp_path / "other")
    before = load_file(folder / WEIGHTS)
    model = build_model(make_policy(), folder, num_steps=10)
    export_hf(model, folder, tmp_path / "unchanged")
    assert same_tensors(load_file(tmp_path / "unchanged" / WEIGHTS), before)
    assert (tmp_path / "unchanged" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    take_step(model, 0)
    export_hf(model, folder, tmp_path / "trained", dtype=torch.bfloat16)
    after = load_file(tmp_path / "trained" / WEIGHTS)
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert after[name].dtype == (torch.float32 if is_vision(name) else torch.bfloat16), name
        assert torch.equal(after[name], weight) == is_vision(name), name
    export_hf(model, folder, tmp_path / "exact")
    ids = make_batch(1)["input_ids"]
    with torch.no_grad():
        expected = whole_model(tmp_path / "exact", family)(ids).logits
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=1e-5, atol=1e-5)


def test_what_the_run_says_of_positions_is_written_into_the_text_part(model_folder: Folder, tmp_path: Path) -> None:
    policy = make_policy(".hf_config_overrides={max_position_embeddings: 64}")
    export_hf(build_model(policy, model_folder("gemma3"), num_steps=None), model_folder("gemma3"), tmp_path / "new")
    before, after = (
        json.loads((each / "config.json").read_text()) for each in (model_folder("gemma3"), tmp_path / "new")
    )
    before["text_config"]["max_position_embeddings"] = 64
    assert after == before


def test_layers_that_predict_further_tokens_are_left_out(model_folder: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("qwen3_5"), folder)
    without, config = load_file(folder / WEIGHTS), json.loads((folder / "config.json").read_text())
    save_file(without | {"mtp.fc.weight": torch.ones(2)}, folder / WEIGHTS, {"format": "pt"})
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"mtp_num_hidden_layers 1 .* Allowed: 0 \(`policy.megatron_cfg.mtp_num_layers"
    ):
        build_model(make_policy(), folder, num_steps=None)
    export_hf(build_model(make_policy("mtp_num_layers=0"), folder, num_steps=None), folder, tmp_path / "new")
    assert same_tensors(load_file(tmp_path / "new" / WEIGHTS), without)
    config["text_config"]["mtp_num_hidden_layers"] = 0
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == config


def test_an_adapter_in_peft_is_the_trained_model(model_folder: Folder, tmp_path: Path) -> None:
    from peft import PeftModel

    folder = model_folder("gemma3")
    targets = "peft.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
    policy = make_policy("peft.enabled=true", "peft.dim=4", targets, "optimizer.lr=0.05")
    model = build_model(policy, folder, num_steps=10)
    for step in range(5):
        take_step(model, step)
    export_adapter(model, policy["megatron_cfg"]["peft"], str(folder), tmp_path / "adapter")
    export_hf(model, folder, tmp_path / "merged")
    ids = make_batch(1)["input_ids"]
    base, merged = whole_model(folder, "gemma3"), whole_model(tmp_path / "merged", "gemma3")
    with torch.no_grad():
        expected, before = merged(ids).logits, base(ids).logits
        with_adapter = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        torch.testing.assert_close(with_adapter(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)
    assert not [name for name, _ in with_adapter.named_parameters() if "lora" in name and is_vision(name)]


@pytest.mark.parametrize("change", ["both", "unknown", "missing"])
def test_weights_that_do_not_fit_are_refused(model_folder: Folder, tmp_path: Path, change: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("gemma3"), folder)
    weights, norm = load_file(folder / WEIGHTS), "model.norm.weight"
    if change == "both":
        weights["model.language_model.norm.weight"] = weights[f"language_model.{norm}"].clone()
        text = rf"language_model\.{norm} and model\.language_model\.norm\.weight are both {norm} of its text part"
    elif change == "unknown":
        weights["audio_tower.weight"] = torch.ones(2)
        text = "1 weights of the folder are no part of the model .*: audio_tower.weight"
    else:
        del weights[f"language_model.{norm}"]
        text = f"1 of .* weights are not in the folder: {norm}"
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ConfigError, match=text):
        build_model(make_policy(), folder, num_steps=None)
