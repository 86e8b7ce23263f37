"""Hugging Face models in Megatron and back: the same logits, the same weights, the same greedy tokens."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from models import FAMILIES, VOCABULARY_SIZE, make_policy, read_model, same_tensors, weights_of, write_model
from safetensors.torch import load_file, save_file

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.megatron_sampling import generate
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model, export_hf

pytestmark = pytest.mark.usefixtures("megatron_process_group")

GREEDY = Sampling(10, top_k=1)
families = pytest.mark.parametrize("family", FAMILIES)
Folder = Callable[[str], Path]


def import_model(folder: Path) -> MegatronModel:
    return build_model(make_policy(), folder, num_steps=10)


@pytest.mark.sampled(8)
@families
def test_logits_equal_those_of_transformers(family: str, model_folder: Folder) -> None:
    reference = read_model(model_folder(family), family)
    model = import_model(model_folder(family)).modules[0].eval()
    ids = torch.randint(0, VOCABULARY_SIZE, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids, torch.arange(16).expand_as(ids), None)
        for row, length in enumerate((16, 9, 5)):
            # What stands right of a row's end, as padding does, must not reach it.
            expected = reference(ids[row : row + 1, :length]).logits[0]
            assert expected.abs().max() > 0.5
            torch.testing.assert_close(logits[row, :length], expected, rtol=0, atol=1e-5)


@pytest.mark.sampled(4)
@families
def test_export_keeps_weights_and_files(family: str, model_folder: Folder, tmp_path: Path) -> None:
    source, destination = model_folder(family), tmp_path / "exported"
    model = import_model(source)
    export_hf(model, source, destination)
    assert same_tensors(
        dict(read_model(source, family).named_parameters()), dict(read_model(destination, family).named_parameters())
    )
    assert load_file(destination / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (destination / name).read_bytes() == (source / name).read_bytes()
    (tmp_path / "new").touch()
    assert (destination / "model.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode, "others may read it"
    assert same_tensors(weights_of(import_model(destination)), weights_of(model))


TOWERS = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
"""Beside the part that is trained, in folders of models with images."""


@pytest.mark.sampled(4)
@families
def test_export_writes_the_present_weights(family: str, model_folder: Folder, tmp_path: Path) -> None:
    source, destination = model_folder(family), tmp_path / "exported"
    destination.mkdir()
    (destination / "of_an_older_export").touch()
    model = import_model(source)
    for weight in model.modules[0].parameters():
        weight.data.mul_(2)
    export_hf(model, source, destination)
    doubled = {
        name: weight * (1 if name.startswith(TOWERS) else 2)
        for name, weight in read_model(source, family).named_parameters()
    }
    assert same_tensors(dict(read_model(destination, family).named_parameters()), doubled)
    assert not (destination / "of_an_older_export").exists()
    assert list(tmp_path.iterdir()) == [destination]


@pytest.mark.sampled(3)
@families
@pytest.mark.parametrize("batch_size", [2, 5])
def test_greedy_generation_gives_the_tokens_of_transformers(family: str, batch_size: int, model_folder: Folder) -> None:
    reference = read_model(model_folder(family), family)
    model = import_model(model_folder(family)).modules[0]
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCABULARY_SIZE, (n,), generator=generator).tolist() for n in (7, 1, 12, 4, 7)]

    @cache
    def expected(end_id: int) -> list[list[int]]:
        rows = [torch.tensor([prompt]) for prompt in prompts]
        settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": end_id, "pad_token_id": 0}
        # Without a mask, transformers takes a prompt's zeros for padding.
        outputs = [reference.generate(row, attention_mask=torch.ones_like(row), **settings) for row in rows]
        return [output[0, row.shape[1] :].tolist() for output, row in zip(outputs, rows, strict=True)]

    unused = next(token for token in range(VOCABULARY_SIZE) if not any(token in row for row in expected(-1)))
    for end_id in (unused, expected(unused)[0][4], expected(unused)[3][0]):
        responses = generate([model], prompts, GREEDY, batch_size=batch_size, end_ids=[end_id], seed=0)
        assert [response.tokens for response in responses] == expected(end_id)
        assert [response.finished for response in responses] == [end_id in row for row in expected(end_id)]
        assert any(response.finished for response in responses) == (end_id != unused)


def test_unsupported_architecture_names_the_folder(tmp_path: Path) -> None:
    config = {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 32, "n_layer": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"policy.model_name: {tmp_path}: .*'BloomForCausalLM' is not") as caught:
        import_model(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def drop_one_weight(file: Path) -> None:
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def narrow_one_weight(file: Path) -> None:
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 48)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("damage", [Path.unlink, truncate, drop_one_weight, narrow_one_weight])
def test_damaged_weights_name_the_folder(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = write_model("qwen2", tmp_path)
    damage(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"policy.model_name: {folder}(/model.safetensors)?[: ]"):
        import_model(folder)
