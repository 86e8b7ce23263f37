"""`policy.hf_config_overrides`: the model that transformers makes of a `config.json` that says the same itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_variants import LENGTH, TOLERANCE, Variant, loss_of, make_ids, write_variant
from models import make_policy

from nemo_rl_offload.megatron.build.model import build_model, export_hf

pytestmark = pytest.mark.usefixtures("megatron_process_group")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def written(family: str, content: dict[str, Any], folder: Path) -> tuple[float, dict[str, Any]]:
    """The loss of a random model of this `config.json` in transformers, and what transformers makes of the file."""
    reference = write_variant(Variant(family, {key: content[key] for key in content}), folder)
    with torch.no_grad():
        loss = loss_of(reference(make_ids(), use_cache=False).logits)
    return loss, dict(reference.config.rope_parameters)


@pytest.mark.parametrize(
    ("family", "own", "overrides", "meant", "is_old"),
    [
        ("qwen2", {}, {"rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 10000.0}}, False),
        ("qwen2", {}, {"rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 10000.0}}, True),
        pytest.param("qwen3", {}, {"rope_scaling": {**YARN, "rope_theta": 500.0, "mscale": 1, "mscale_all_dim": 0}}, {"rope_parameters": {**YARN, "rope_theta": 500.0}}, False, marks=pytest.mark.slow),  # noqa: E501
        pytest.param("llama", {"rope_parameters": {**LINEAR, "rope_theta": 10000.0}}, {"rope_theta": 300.0}, {"rope_parameters": {**LINEAR, "rope_theta": 300.0}}, False, marks=pytest.mark.slow),  # noqa: E501
        pytest.param("llama", {"rope_parameters": {**LINEAR, "rope_theta": 300.0}}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, False, marks=pytest.mark.slow),  # noqa: E501
        pytest.param("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}}, {"rope_parameters": YARN}, {"rope_parameters": {**YARN, "rope_theta": 300.0, "partial_rotary_factor": 0.5}}, False, marks=pytest.mark.slow),  # noqa: E501
    ],
)  # fmt: skip
def test_the_model_is_transformers(
    family: str, own: dict[str, Any], overrides: dict[str, Any], meant: dict[str, Any], is_old: bool, tmp_path: Path
) -> None:
    loss, positions = written(family, meant, tmp_path / "meant")
    plain, _ = written(family, own, tmp_path / "plain")
    content = Variant(family, own).content
    if is_old:
        theta = content.pop("rope_parameters")["rope_theta"]
        content |= {"rope_theta": theta, "rope_scaling": None}
    folder = tmp_path / "meant"
    (folder / "config.json").write_text(json.dumps(content))
    policy = {**make_policy(f".max_total_sequence_length={LENGTH}"), "hf_config_overrides": overrides}
    model = build_model(policy, folder, num_steps=None)  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model.modules[0].eval()(make_ids(), torch.arange(LENGTH).expand_as(make_ids()), None)
    assert loss_of(logits) == pytest.approx(loss, abs=TOLERANCE)
    assert abs(loss - plain) > 10 * TOLERANCE, "positions matter"
    export_hf(model, folder, tmp_path / "exported")
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager").float().eval()
    with torch.no_grad():
        assert loss_of(again(make_ids(), use_cache=False).logits) == pytest.approx(loss, abs=TOLERANCE)
    assert {key: again.config.rope_parameters[key] for key in positions if key in meant["rope_parameters"]} == {
        key: value for key, value in positions.items() if key in meant["rope_parameters"]
    }
