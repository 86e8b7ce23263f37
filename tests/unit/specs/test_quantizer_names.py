"""Which quantizers a configuration turns on: ModelOpt's own, by name, and files in its language."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.quantization import NAMED, find_quantization, read_quantization

MODELOPT = json.loads((Path(__file__).parents[1] / "modelopt.json").read_text())
"""What ModelOpt's own code says (the version in it): quantizers that are on, and what elements are worth."""
FOLDER = PROJECT_ROOT / "examples/modelopt/quant_configs"
CFG: dict[str, Any] = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}
OFF = {"quantizer_name": "*", "enable": False}


@pytest.mark.parametrize("name", list(NAMED))
def test_a_name_means_what_it_means_to_modelopt(name: str) -> None:
    found = {quantizer: NAMED[name].block(quantizer) for quantizer in MODELOPT["quantizers"][name]}
    assert found == MODELOPT["quantizers"][name]
    assert len(set(found.values())) == 2, "some are on"


@pytest.mark.parametrize(
    ("file", "on", "off"),
    [
        ("nvfp4_a16", ["layers.0.self_attention.linear_qkv", "layers.4.mlp.experts.linear_fc2"], ["layers.0.router"]),
        ("nvfp4_a16_mlp_only", ["layers.4.mlp.linear_fc1"], ["layers.0.self_attention.linear_qkv", "layers.1.router"]),
        ("nvfp4_experts_weightonly", ["layers.4.mlp.experts.linear_fc1"], ["layers.4.mlp.shared_experts.linear_fc1"]),
        (
            "nano3_nvfp4_weightonly",
            ["layers.0.mixer.in_proj", "layers.1.mlp.experts.linear_fc1", "layers.40.mixer.out_proj"],
            ["layers.5.self_attention.linear_qkv", "layers.4.mixer.in_proj", "layers.41.mixer.in_proj"],
        ),
    ],
)
def test_shipped_files(file: str, on: list[str], off: list[str]) -> None:
    found = read_quantization(FOLDER / f"{file}.yaml")
    assert [found.block(f"decoder.{name}.weight_quantizer") for name in on] == [16] * len(on)
    assert [found.block(f"decoder.{name}.weight_quantizer") for name in off] == [None] * len(off)
    assert found.block("output_layer.weight_quantizer") is None
    assert {found.block(f"decoder.{name}.input_quantizer") for name in on} == {None}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "quant.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quant.yaml: cannot read the file: No such file"):
        read_quantization(tmp_path / "quant.yaml")


def test_a_later_entry_counts_over_an_earlier_one(tmp_path: Path) -> None:
    entries = [OFF, {"quantizer_name": "*fc[12].weight_quantizer", "cfg": CFG}]
    wide = {"quantizer_name": "*.7.*", "enable": False}
    harmless = {"quantizer_name": "*", "parent_class": "nn.BatchNorm1d", "enable": False}
    content = {"algorithm": {"method": "max"}, "quant_cfg": [*entries, wide, harmless]}
    for each in (content, {"quantize": content, "metadata": {"recipe_type": "ptq"}}):
        found = find_quantization(str(written(tmp_path, each)))
        names = [f"decoder.layers.{number}.mlp.linear_fc{part}" for number, part in ((0, 1), (0, 2), (0, 3), (7, 1))]
        assert [found.block(f"{name}.weight_quantizer") for name in names] == [16, 16, None, None]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "a list 'quant_cfg'"),
        ({"quant_cfg": {"*weight_quantizer": CFG}}, "a list 'quant_cfg'"),
        ({"quant_cfg": [OFF], "algorithm": "awq_lite"}, "algorithm: 'awq_lite' is not known. Allowed: max"),
        ({"quant_cfg": ["*"]}, r"quant_cfg\[0\]: must be a mapping"),
        ({"quant_cfg": [{"$import": "units/base"}]}, r"quant_cfg\[0\]: \$import is not read here"),
        (
            {"quant_cfg": [OFF, {"quantizer": "*"}]},
            r"quant_cfg\[1\]: unknown key 'quantizer'. Did you mean 'quant",
        ),
        ({"quant_cfg": [{"enable": False}]}, "quantizer_name must be a pattern"),
        ({"quant_cfg": [{**OFF, "enable": 0}]}, "enable true or false"),
        ({"quant_cfg": [{"quantizer_name": "*"}]}, "need cfg"),
        ({"quant_cfg": [{**OFF, "parent_class": "nn.Linear"}]}, "parent_class may only turn off"),
        ({"quant_cfg": [{"quantizer_name": "*", "cfg": CFG, "parent_class": "nn.Embedding"}]}, "may only turn off"),
        ({"quant_cfg": [OFF], "algoritm": "awq_lite"}, "unknown key 'algoritm'. Did you mean 'algorithm'"),
        ({"quantize": {"quant_cfg": [OFF], "kv": {}}}, "unknown key 'kv'. Allowed: quant_cfg, algorithm"),
        (
            {"quantize": {"quant_cfg": [OFF]}, "algorithm": "awq_lite"},
            "unknown key 'algorithm'. Allowed: metadata, qua",
        ),
        ({"quantize": {"quant_cfg": [OFF]}, "quant_cfg": [OFF]}, "unknown key 'quant_cfg'"),
        *(
            ({"quant_cfg": [OFF, {"quantizer_name": "*weight_quantizer", "cfg": {**CFG, **change}}]}, "NVFP4 alone")
            for change in (
                {"num_bits": 8},
                {"num_bits": "e4m3"},
                {"block_sizes": None},
                {"block_sizes": {**CFG["block_sizes"], -1: 128}},
                {"block_sizes": {**CFG["block_sizes"], -2: 16}},
                {"block_sizes": {**CFG["block_sizes"], "type": "static"}},
                {"block_sizes": {**CFG["block_sizes"], "scale_bits": "e8m0"}},
                {"use_constant_amax": True},
            )
        ),
    ],
)
def test_what_is_not_known_is_said(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_quantization(written(tmp_path, content))
