"""The redirections for a machine without CUDA leave the rest of torch, and transformers, as they were."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.megatron.runtime import cpu

pytestmark = pytest.mark.usefixtures("process_group")


def test_torch_device_context_still_decides() -> None:
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
        assert torch.tensor([1.0]).device.type == "meta"
        assert torch.empty(2).device.type == "meta"
    assert torch.zeros(2).device.type == "cpu"


def test_transformers_loads_the_right_rotary_buffers(tmp_path: Path) -> None:
    shape = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    expected = 1.0 / 1e4 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)


def test_megatron_sees_the_cpu() -> None:
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(1).cuda().device.type == "cpu"
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64
    from megatron.core import utils

    assert utils.torch.zeros(2, device="cuda").device.type == "cpu"
    assert utils.torch.tensor([1], device=torch.device("cuda", 0)).device.type == "cpu"
    assert utils.torch.zeros(2, device="meta").device.type == "meta"


def test_random_states_are_those_of_the_cpu() -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_installing_again_changes_nothing() -> None:
    before = torch.Tensor.type, torch.cuda.current_device, torch.cuda.Stream
    assert cpu.install_cpu_support()
    assert before == (torch.Tensor.type, torch.cuda.current_device, torch.cuda.Stream)


def test_nothing_is_redirected_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: list[bool] = []
    monkeypatch.setattr(cpu, "leave_out_broken_packages", lambda: left_out.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu.install_cpu_support()
    assert left_out == [True]


@pytest.mark.slow
def test_importing_the_module_changes_nothing() -> None:
    code = (
        "import torch; before = torch.Tensor.type, torch.cuda.current_device\n"
        "import nemo_rl_offload.megatron.runtime.cpu\n"
        "assert before == (torch.Tensor.type, torch.cuda.current_device)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT_ROOT)


NEEDS_A_GPU = """
class FusedAdam:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("Found no NVIDIA driver on your system.")
FusedSGD = FusedAdam
"""


@pytest.mark.slow
def test_an_installed_transformer_engine_is_left_alone(tmp_path: Path) -> None:
    optimizers = tmp_path / "transformer_engine/pytorch/optimizers"
    optimizers.mkdir(parents=True)
    (optimizers / "__init__.py").write_text(NEEDS_A_GPU)
    for folder in optimizers.parents[:2]:
        (folder / "__init__.py").write_text("__version__ = '2.20.2'\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from transformer_engine.pytorch.optimizers import FusedAdam\n"
        "from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support\n"
        "install_cpu_support()\n"
        "import torch\n"
        "from nemo_rl_offload.megatron.build.bridge import bridge, have_transformer_engine\n"
        "assert bridge().AutoBridge\n"
        "assert not have_transformer_engine()\n"
        "from megatron.core import optimizer\n"
        "assert optimizer.Adam is torch.optim.AdamW, optimizer.Adam\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT_ROOT)
