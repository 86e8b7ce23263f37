"""Every weight of a model's folder is read, or named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import make_policy, read_model, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import build_model, export_hf

pytestmark = pytest.mark.usefixtures("megatron_process_group")
Weights = dict[str, Tensor]


def _without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


def _with(name: str, value: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: value}


def _load(folder: Path, change: Callable[[Weights], Weights], family: str = "qwen3") -> None:
    write_model(family, folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    build_model(make_policy(), folder, num_steps=None)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_norm.weight"]
)
def test_a_missing_weight_is_named_as_in_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"1 of .* weights are not in the folder: {name}. Is the download complete"):
        _load(tmp_path, _without(name))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.gate_proj.lora_A.weight", "score.weight"]
)
def test_a_weight_that_no_parameter_reads_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"1 weights of the folder are no part of the model .*: {name}. Training it"):
        _load(tmp_path, _with(name, torch.ones(4)))


def test_layers_for_further_tokens_that_are_not_there(tmp_path: Path) -> None:
    """transformers leaves them out of what it saves, and keeps the number in config.json."""
    further = "model.layers.3."
    with pytest.raises(ConfigError, match=r"Set policy\.megatron_cfg\.mtp_num_layers to 0"):
        _load(
            tmp_path,
            lambda weights: {key: value for key, value in weights.items() if not key.startswith(further)},
            "deepseek_v3_mtp",
        )


def test_many_names_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"7 weights .*: x0, x1, x2, x3 and 3 more\."):
        _load(tmp_path, lambda weights: {**weights, **{f"x{number}": torch.ones(1) for number in range(7)}})


def test_computed_buffers_and_uncounted_layers_are_no_weights(tmp_path: Path) -> None:
    _load(tmp_path / "a", _with("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)))
    _load(tmp_path / "b", _with("model.layers.2.enorm.weight", torch.ones(32)))


def test_a_tied_head_may_be_the_embedding_again_and_nothing_else(tmp_path: Path) -> None:
    embedding = "model.embed_tokens.weight"
    _load(tmp_path / "same", lambda weights: {**weights, "lm_head.weight": weights[embedding].clone()}, "qwen2")
    with pytest.raises(ConfigError, match=r"lm_head.weight is not model.embed_tokens.weight, .* Set it to false"):
        _load(tmp_path / "other", lambda weights: {**weights, "lm_head.weight": weights[embedding] + 1}, "qwen2")


def _repeated(weights: Weights, difference: float = 0) -> Weights:
    """As public models with a layer that predicts a further token hold it: with embedding and head once more."""
    further = {
        "model.layers.3.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.3.shared_head.head.weight": weights["lm_head.weight"] + difference,
    }
    return {**weights, **further}


def test_what_a_further_layer_repeats_is_read_and_exported_as_trained(tmp_path: Path) -> None:
    folder = write_model("deepseek_v3_mtp", tmp_path / "model")
    file = folder / "model.safetensors"
    save_file(_repeated(load_file(file)), file, metadata={"format": "pt"})
    model = build_model(make_policy(), folder, num_steps=None)
    with torch.no_grad():
        model.modules[0].output_layer.weight.mul_(2)
    export_hf(model, folder, tmp_path / "exported")
    before, after = load_file(file), load_file(tmp_path / "exported" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"lm_head.weight", "model.layers.3.shared_head.head.weight"}
    assert torch.equal(after["model.layers.3.shared_head.head.weight"], 2 * before["lm_head.weight"])


def test_what_a_further_layer_has_of_its_own_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers.3.shared_head.head.weight is not lm_head.weight, .*_layers to 0\."):
        _load(tmp_path, lambda weights: _repeated(weights, 1), "deepseek_v3_mtp")


def test_a_further_layer_that_transformers_did_not_save_is_told_from_a_download_that_broke_off(tmp_path: Path) -> None:
    def without_further(weights: Weights) -> Weights:
        return {name: value for name, value in weights.items() if not name.startswith("model.layers.3.")}

    with pytest.raises(ConfigError, match=r"not in the folder: .*Set \S+mtp_num_layers to 0"):
        _load(tmp_path, without_further, "deepseek_v3_mtp")


def test_a_weight_without_a_name_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's model has beyond the folder's would be lost by an export."""
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    table = Qwen3Bridge.mapping_registry

    def without_norms(self: object) -> object:
        registry = table(self)
        registry.mappings = [one for one in registry.mappings if "k_layernorm" not in one.megatron_param]
        return type(registry)(*registry.mappings)

    monkeypatch.setattr(Qwen3Bridge, "mapping_registry", without_norms)
    with pytest.raises(ConfigError, match=r"Megatron-Bridge has no name for decoder\.layers\.0\.\S*k_layernorm"):
        _load(tmp_path, dict)


def _in_two_files(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {key: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, key in enumerate(weights)}
    for name in set(names.values()):
        save_file({key: weights[key] for key in weights if names[key] == name}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _beside(folder: Path) -> None:
    """Another program's copy, and a part of an earlier version."""
    save_file({"tok_embeddings.weight": torch.ones(4)}, folder / "consolidated.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "model-00001-of-00001.safetensors")


def _by_code_of_its_own(folder: Path) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Qwen3ForCausalLM"}}
    path.write_text(json.dumps(content))
    (folder / "modeling_mine.py").write_text("raise SystemExit(3)\n")


def _by_another_name(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["QwenLMHeadModel"]}))


def _by_no_name(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": None}))


@pytest.mark.parametrize("change", [_in_two_files, _beside, _by_code_of_its_own, _by_another_name, _by_no_name])
def test_the_files_that_transformers_reads_are_read(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path)
    change(folder)
    model = build_model(make_policy(), folder, num_steps=None)
    reference = read_model(folder, "qwen3").state_dict()
    loaded = dict(model.auto_bridge.export_hf_weights(model.modules, cpu=True))
    assert loaded.keys() == reference.keys()
    assert all(torch.equal(loaded[name], reference[name]) for name in loaded)


def _without_a_part(folder: Path) -> None:
    _in_two_files(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _of_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _half(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def _in_eight_bits(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_a_part, "index.json names are not there: model-00002-of-00002.safetensors. Is the download complete"),
        (_of_pickle, "has neither model.safetensors .* It has pytorch_model.bin: save the model anew"),
        (_half, r"model.safetensors cannot be read: .* Is the download complete"),
        (_in_eight_bits, r"1 weights are of a type that is not trained, .*up_proj.weight \(F8_E4M3\)"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"),
            "has adapter_config.json, .*Merge the adapter",
        ),
    ],
)
def test_files_that_cannot_be_trained_from_are_named(
    change: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    folder = write_model("qwen3", tmp_path)
    change(folder)
    with pytest.raises(ConfigError, match=f"policy.model_name: {tmp_path}.*{words}"):
        build_model(make_policy(), folder, num_steps=None)


def test_scales_of_weights_that_are_not_said_to_be_quantized_are_no_part_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no part of the model .*: model.norm.weight_scale_inv\. "):
        _load(tmp_path, _with("model.norm.weight_scale_inv", torch.ones(1)))


def _say_quantized(folder: Path, **section: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": section}))


def test_blocks_of_fp8_are_read(tmp_path: Path) -> None:
    """DeepSeek-V3's own weights: e4m3 with a factor for every block of 128 x 128."""
    folder = write_model("deepseek_v3", tmp_path)
    file, name = folder / "model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    weights = load_file(file)
    scale = weights[name].abs().max() / 448
    weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = scale.view(1, 1)
    save_file(weights, file, metadata={"format": "pt"})
    _say_quantized(folder, quant_method="fp8", weight_block_size=[128, 128])
    model = build_model(make_policy(), folder, num_steps=None)
    loaded = dict(model.modules[0].named_parameters())["decoder.layers.1.self_attention.linear_proj.weight"]
    assert torch.equal(loaded, (weights[name].float() * scale).bfloat16().float())  # the type that Bridge takes them to


def test_mxfp4_is_read(tmp_path: Path) -> None:
    """gpt-oss' own weights: 32 numbers of four bits with one exponent; transformers is the reference."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = write_model("gpt_oss", tmp_path)
    file, name = folder / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    weights = load_file(file)
    num_experts, num_in, num_out = weights.pop(name).shape
    generator = torch.Generator().manual_seed(0)
    shape = (num_experts, num_out, num_in // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 128, shape, dtype=torch.uint8, generator=generator)
    save_file({**weights, f"{name}_blocks": blocks, f"{name}_scales": scales}, file, metadata={"format": "pt"})
    _say_quantized(folder, quant_method="mxfp4")
    model = build_model(make_policy(), folder, num_steps=None)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, in, out]
    parameters = dict(model.modules[0].named_parameters())
    for expert in range(num_experts):
        loaded = parameters[f"decoder.layers.1.mlp.experts.linear_fc2.weight{expert}"]
        torch.testing.assert_close(loaded, expected[expert].T)
