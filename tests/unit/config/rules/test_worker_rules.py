"""Environment variables of workers, and fields of Megatron-Core by name."""

from collections.abc import Callable

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, read_config
from nemo_rl_offload.config.validation import CheckedConfig, examine
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
M = "policy.megatron_cfg"
TINY = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        ("env_vars={RANK:'1'}", "env_vars.RANK", "is set for each worker by this project"),
        ("env_vars={NCCL_DEBUG:1}", "env_vars.NCCL_DEBUG", "1 is not allowed. Allowed: text."),
        (
            "model_overrides={rotary_percnt:0.5}",
            "model_overrides.rotary_percnt",
            "TransformerConfig has no such field.",
        ),
        (
            "model_overrides={attention_softmax_in_fp3:true}",
            "model_overrides.attention_softmax_in_fp3",
            "Did you mean 'attention_softmax_in_fp32'?",
        ),
        (
            "model_overrides={cpu_offloading:true}",
            "model_overrides.cpu_offloading",
            f"has a key of its own. Set {M}.cpu_offloading",
        ),
        ("model_overrides={num_layers:2}", "model_overrides.num_layers", "set by the model's folder"),
        ("model_overrides={bf16:true}", "model_overrides.bf16", "set by policy.precision"),
        ("model_overrides={init_method:x}", "model_overrides.init_method", "cannot be written in YAML"),
        (
            "model_overrides={attention_softmax_in_fp32:1}",
            "model_overrides.attention_softmax_in_fp32",
            "1 is not allowed. Allowed: true or false.",
        ),
        ("cpu_affinity.map={a:1}", "cpu_affinity.map.a", "is no key here. Allowed: whole numbers."),
        ("cpu_affinity.map={0:-1}", "cpu_affinity.map.0", "-1 is not allowed. Allowed: a whole number from 0."),
    ],
)
def test_refused(check: Check, overrides: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(f"{M}.{overrides}")
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"{M}.{path}: ")
    assert words in line


def test_accepted(check: Check) -> None:
    checked = check(
        f"{M}.env_vars={{NCCL_DEBUG:INFO}}",
        f"{M}.model_overrides={{attention_softmax_in_fp32:true,init_method_std:0.01,moe_z_loss_coeff:null}}",
        f"{M}.cpu_affinity.map={{0:0,1:0}}",
    )
    section = checked.config["policy"]["megatron_cfg"]
    assert section["env_vars"] == {"NCCL_DEBUG": "INFO"}
    assert section["cpu_affinity"]["map"] == {0: 0, 1: 0}


def test_fields_that_megatron_checks_itself_are_warned_about(check: Check) -> None:
    assert check(f"{M}.model_overrides={{moe_z_loss_coeff:0.1}}").warnings == []
    (warning,) = check(f"{M}.model_overrides={{use_mup:true}}").warnings
    assert warning.startswith(f"{M}.model_overrides.use_mup: Megatron-Core's own rules for it")
    found = examine(read_config(TINY, [f"{M}.model_overrides={{num_layers:3}}"]), run_here=False)
    assert [problem.path for problem in found.problems] == [f"{M}.model_overrides.num_layers"]
    assert found.warnings == [], "it is refused, and nothing else is to be said about it"
