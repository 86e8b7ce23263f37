"""The engine in Megatron's layers by one call: where a policy says how, and in a program of Megatron's own."""

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import megatron.core
import pytest
from megatron.core import recompute, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction, transformer_layer
from megatron.core.transformer.transformer_config import TransformerConfig
from patience import PATIENCE_S

from nemo_rl_offload import OffloadOptions
from nemo_rl_offload.adapters import megatron_core
from nemo_rl_offload.adapters.megatron_core import interface
from nemo_rl_offload.adapters.megatron_core.installation import install_engine
from nemo_rl_offload.adapters.megatron_core.interface import OffloadInterface, use_engine
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.offload.selection import Selection
from nemo_rl_offload.specs.offload_modules import NATIVE_MODULES

OPTIONS = OffloadOptions(host_memory_budget_bytes=3 << 20)
_PREPROCESS = "preprocess_for_fine_grained_offloading"


@pytest.fixture(autouse=True)
def _no_engine_afterwards() -> Iterator[None]:
    yield
    megatron_core.uninstall()
    use_engine(None)


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn", "mlp_norm"],
        }
        | changes
    )


def test_megatrons_layers_use_the_engine_of_the_options() -> None:
    engine = install_engine(OffloadOptions(modules=["core_attn", "mlp_norm"], host_memory_budget_bytes=3 << 20))
    assert engine is not None
    assert megatron_offload.FineGrainedActivationOffloadingInterface is OffloadInterface
    assert OffloadInterface.engine is engine
    assert OffloadInterface.modules == {"core_attn", "mlp_norm"}
    assert engine._arena._budget_bytes == 3 << 20
    assert engine._steps_are_told
    assert install_engine(None) is None
    assert OffloadInterface.engine is None
    engine.close()


def test_auto_may_choose_from_all_modules() -> None:
    engine = install_engine(
        OffloadOptions(modules="auto", gpu_memory_budget_bytes=1 << 30, host_memory_budget_bytes=3 << 20)
    )
    assert engine is not None
    assert OffloadInterface.modules == set(NATIVE_MODULES)
    engine.close()


def test_megatrons_class_is_back_wherever_it_was_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    interface.restore_megatrons()
    program = types.ModuleType("somebodys_trainer")
    program.off_interface = megatron_offload.FineGrainedActivationOffloadingInterface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_trainer", program)
    watched = [
        *((megatron_offload, "FineGrainedActivationOffloadingInterface"), (program, "off_interface")),
        *((module, "tensor_parallel") for module in (recompute, multi_token_prediction, transformer_layer)),
        *((model, _PREPROCESS) for model in (GPTModel, HybridModel)),
        *(
            (module, name)
            for module in (schedules, sys.modules["megatron.core.models.gpt.gpt_model"])
            for name, value in vars(module).items()
            if value is megatron_offload.FineGrainedActivationOffloadingInterface
        ),
    ]
    before = [vars(owner)[name] for owner, name in watched]
    assert len(watched) == 9
    assert before[2] is tensor_parallel
    megatron_core.install(OPTIONS)
    assert all(vars(owner)[name] is not value for (owner, name), value in zip(watched, before, strict=True))
    megatron_core.uninstall()
    assert [vars(owner)[name] for owner, name in watched] == before
    megatron_core.uninstall()


def test_megatrons_knobs_reach_the_engine() -> None:
    installed = megatron_core.install(OPTIONS)
    assert installed.stats().bytes_out == 0
    assert installed._engine is None, "the device is not known yet"
    knobs = {
        "min_offloaded_tensor_size": 9,
        "activation_offload_fraction": 0.5,
        "delta_offload_bytes_across_pp_ranks": 1000,
        "fine_grained_offloading_max_inflight_offloads": 3,
    }
    installed.begin(config(**knobs), 2)
    engine = OffloadInterface.engine
    assert engine is not None
    assert OffloadInterface.modules == {"core_attn", "mlp_norm"}
    assert (engine._min_tensor_elements, engine._min_tensor_bytes) == (9, 0)
    assert engine._selection == Selection(fraction=0.5, kept_bytes_per_step=2000)
    assert engine._copies._max_inflight_groups == 3
    installed.begin(config(**knobs), 2)
    assert OffloadInterface.engine is engine
    with pytest.raises(ConfigError, match=r"must offload alike. activation_offload_fraction: 0.5 and 1.0$"):
        installed.begin(config(**knobs | {"activation_offload_fraction": 1.0}), 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modules": ["core_attn"]}, "modules: .* Set its offload_modules instead"),
        ({"min_tensor_bytes": 5}, "min_tensor_bytes: .* Set its min_offloaded_tensor_size instead"),
        ({"min_tensor_elements": 5}, "min_tensor_elements: .* Set its min_offloaded_tensor_size instead"),
        ({"fraction": 0.5}, "fraction: .* Set its activation_offload_fraction instead"),
        ({"kept_bytes_per_step": 5}, "Set its delta_offload_bytes_across_pp_ranks instead"),
        ({"max_inflight_groups": 5}, "Set its fine_grained_offloading_max_inflight_offloads instead"),
    ],
)
def test_what_megatrons_configuration_says_is_said_there(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        megatron_core.install(OffloadOptions(host_memory_budget_bytes=1, **options))
    assert GPTModel.preprocess_for_fine_grained_offloading.__module__ == GPTModel.__module__
    assert not hasattr(GPTModel.preprocess_for_fine_grained_offloading, "__wrapped__")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offload_modules": ["core_attn", "fused_group_mlp"]}, "'fused_group_mlp' is known to Megatron-Core's own"),
        ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl: full_iteration cannot be captured"),
        (
            {
                "multi_latent_attention": True,
                "recompute_granularity": "selective",
                "recompute_modules": ["mla_up_proj"],
            },
            "'mla_up_proj' frees what 'core_attn' offloads",
        ),
    ],
)
def test_what_megatron_accepts_and_the_engine_does_not_do(changes: dict[str, Any], words: str) -> None:
    asked = config()
    for name, value in changes.items():  # past the checks of Megatron's own
        setattr(asked, name, value)
    with pytest.raises(ConfigError, match=words):
        megatron_core.install(OPTIONS).begin(asked, 0)
    assert OffloadInterface.engine is None


def test_another_version_is_refused_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.20.0rc1+abc")
    with pytest.raises(ConfigError, match=r"megatron-core 0.20.0rc1: .* Known: 0.19.2\."):
        megatron_core.install(OPTIONS)
    monkeypatch.setattr(megatron.core, "__version__", "0.19.2+1a2b3c4")
    megatron_core.install(OPTIONS)


def test_two_engines_at_once() -> None:
    megatron_core.install(OPTIONS)
    with pytest.raises(ConfigError, match="installed in this process already"):
        megatron_core.install(OPTIONS)


@pytest.mark.slow
def test_a_process_that_installs_it_has_nothing_else_of_this_project() -> None:
    code = (
        "import sys\n"
        "from nemo_rl_offload import OffloadOptions\n"
        "from nemo_rl_offload.adapters import megatron_core\n"
        "megatron_core.install(OffloadOptions(host_memory_budget_bytes=1))\n"
        "print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("nemo_rl_offload.")} == {
        f"nemo_rl_offload.{part}" for part in ("adapters", "errors", "offload", "specs", "units")
    }
    assert not loaded & {"ray", "hydra", "omegaconf", "transformers"}
