"""Checkpoints: a resumed run is the run that was never stopped, bit for bit; anything else is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from models import make_policy, same_tensors, take_step, weights_of

from nemo_rl_offload.errors import CheckpointError, ConfigError
from nemo_rl_offload.megatron import checkpoint
from nemo_rl_offload.megatron.model import MegatronModel, build_model

pytestmark = pytest.mark.usefixtures("megatron_process_group")

SCHEDULE = ("scheduler.lr_warmup_iters=3", "scheduler.lr_decay_style=cosine", "optimizer.weight_decay=0.1")
Build = Callable[..., MegatronModel]


@pytest.fixture
def build(model_folder: Callable[[str], Path]) -> Build:
    def make(family: str, *overrides: str) -> MegatronModel:
        return build_model(make_policy(*SCHEDULE, *overrides), model_folder(family), num_steps=6)

    return make


@pytest.fixture(scope="module")
def saved(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a dense model after one step."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = build_model(make_policy(*SCHEDULE), model_folder("qwen2"), num_steps=6)
    take_step(model, 0)
    checkpoint.save(model, folder)
    return folder


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize(("optimizer", "distributed"), [("adam", "true"), ("adam", "false"), ("sgd", "false")])
def test_resuming_changes_no_bit(family: str, distributed: str, optimizer: str, build: Build, tmp_path: Path) -> None:
    overrides = (f"optimizer.use_distributed_optimizer={distributed}", f"optimizer.optimizer={optimizer}")
    model = build(family, *overrides)
    for step in range(2):
        take_step(model, step)
    checkpoint.save(model, tmp_path)
    at_save = weights_of(model)
    expected = [take_step(model, step) for step in (2, 3)]
    final = weights_of(model)
    for resumed in (build(family, *overrides), model):
        checkpoint.load(resumed, tmp_path)
        assert same_tensors(weights_of(resumed), at_save)
        assert [take_step(resumed, step) for step in (2, 3)] == expected
        assert same_tensors(weights_of(resumed), final)


def test_megatron_refuses_to_distribute_sgd(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"policy.megatron_cfg.optimizer: .*Only Adam"):
        build("qwen2", "optimizer.optimizer=sgd", "optimizer.use_distributed_optimizer=true")


def test_missing_folder(build: Build, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'nothing'} is not a checkpoint"):
        checkpoint.load(build("qwen2"), tmp_path / "nothing")


def test_truncated_file(build: Build, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    data = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=f"{folder} cannot be read into this model"):
        checkpoint.load(build("qwen2"), folder)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_another_model(family: str, build: Build, saved: Path) -> None:
    model = build(family)
    with pytest.raises(CheckpointError, match=f"{saved} cannot be read into this model") as caught:
        checkpoint.load(model, saved)
    assert "shape mismatch" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
