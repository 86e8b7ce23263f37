"""An optimizer whose state waits on the host: every bit is that of one on the device, in runs and their checkpoints."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from kill_runs import differences, is_rank, settings
from models import make_policy, same_tensors, take_step, weights_of
from optimizer_cases import run_case, state_of
from patience import PATIENCE_S
from ranks import Ranks
from test_grpo_run import start_run, wait_for, wait_until_gone

from nemo_rl_offload.adapters.megatron_core.installation import make_backend
from nemo_rl_offload.megatron.build import model as model_building
from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.megatron.checkpoint import distributed as checkpoint
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.policy.residency import megatron_optimizer
from nemo_rl_offload.policy.residency.megatron_optimizer import keep_on_host, keep_what_waits_on_host

if TYPE_CHECKING:
    from rank_work import Resumed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_HOST = "optimizer.optimizer_cpu_offload=true"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "dp2": (2, ()),
    "ep2": (2, ("expert_model_parallel_size=2",)),
    "pp2": (2, ("pipeline_model_parallel_size=2",)),
    "etp2": (2, ("expert_tensor_parallel_size=2",)),
}
SETTINGS = ("optimizer.lr=1e-2", "optimizer.weight_decay=0.1", "scheduler.lr_warmup_iters=3", "moe_aux_loss_coeff=0")


@pytest.mark.slow
@pytest.mark.usefixtures("megatron_process_group")
@pytest.mark.parametrize("seed", range(1001, 1003))
def test_no_bit_changes(seed: int, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    assert run_case(seed, model_folder, tmp_path).faults == []


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.usefixtures("megatron_process_group")
def test_no_bit_changes_in_thirty_cases(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for seed in range(2000, 2030):
        assert run_case(seed, model_folder, tmp_path).faults == [], seed


@pytest.mark.usefixtures("megatron_process_group")
def test_a_model_that_is_not_written_is_found(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    monkeypatch.setattr(megatron_optimizer, "_flat", lambda weight, part: weight.data.clone().view(-1)[part])
    assert any(run_case(seed, model_folder, tmp_path).faults for seed in range(1001, 1003))


@pytest.mark.usefixtures("megatron_process_group")
@pytest.mark.parametrize(("overrides", "num_steps", "share"), [((), 4, 0), ((ON_HOST,), 4, 1), ((ON_HOST,), None, 0)])
def test_a_worker_moves_what_its_keys_say(
    overrides: tuple[str, ...], num_steps: int | None, share: float, model_folder: Callable[[str], Path]
) -> None:
    policy, arena = make_policy(*overrides), HostArena(HostBackend(), 1 << 26)
    keep = partial(keep_what_waits_on_host, policy, arena)
    model = build_model(policy, model_folder("qwen2"), num_steps, keep_optimizer=keep)
    num_parameters = sum(weight.numel() for module in model.modules for weight in module.parameters())
    assert share * 8 * num_parameters <= arena.held_bytes <= share * 1.1 * 8 * num_parameters


@pytest.mark.usefixtures("megatron_process_group")
@pytest.mark.parametrize("distributed", ["true", "false"])
def test_gradients_have_no_memory_while_an_optimizer_is_made_and_moved(
    distributed: str, monkeypatch: pytest.MonkeyPatch, model_folder: Callable[[str], Path]
) -> None:
    """Beside gradients, main weights on the device would need more at the start than any step does."""
    sizes: list[int] = []
    original = model_building.get_megatron_optimizer

    def note(chunks: Any) -> None:
        sizes.extend(buffer.grad_data.untyped_storage().nbytes() for chunk in chunks for buffer in chunk.buffers)

    def make(config: Any, chunks: Any) -> Any:
        note(chunks)
        made.append(chunks)
        return original(config, chunks)

    made: list[Any] = []
    monkeypatch.setattr(model_building, "get_megatron_optimizer", make)
    policy = make_policy(f"optimizer.use_distributed_optimizer={distributed}", ".precision=bfloat16")
    model = build_model(policy, model_folder("qwen2"), 4, keep_optimizer=lambda _: note(made[0]))
    assert sizes == [0] * 2 * len(model.chunks[0].buffers)
    buffers = [buffer.grad_data for buffer in model.chunks[0].buffers]
    assert all(data.untyped_storage().nbytes() >= data.nbytes > 0 and not data.any() for data in buffers)


@pytest.mark.usefixtures("megatron_process_group")
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_checkpoint_is_written_straight_from_the_host(
    precision: str, monkeypatch: pytest.MonkeyPatch, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    staged: set[int] = set()

    def write(self: checkpoint.Save, buckets: list[Any]) -> None:
        staged.update(tensor.data_ptr() for _, _, (_, tensors) in buckets for _, tensor in tensors)
        original(self, buckets)

    original = checkpoint.Save._write
    monkeypatch.setattr(checkpoint.Save, "_write", write)
    policy = make_policy(f".precision={precision}", "optimizer.use_distributed_optimizer=false")
    model = build_model(policy, model_folder("qwen2"), num_steps=4)
    assert model.optimizer is not None
    streamed = keep_on_host(model.optimizer, HostArena(HostBackend(), 1 << 26), 1.0)
    checkpoint.save(model, tmp_path)
    tensors = [tensor for each in streamed for slabs in each._slabs for home in slabs.homes for tensor in home.values()]
    assert len(tensors) > 20
    gate_and_up = (128, 32)  # Megatron-Core writes their halves, and copies what is no whole storage
    assert {tensor.data_ptr() for tensor in tensors if tensor.shape != gate_and_up} <= staged


@pytest.mark.cuda
@needs_gpu
@pytest.mark.usefixtures("any_device_process_group")
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize(
    "overrides",
    [
        (".precision=bfloat16", "optimizer.use_distributed_optimizer=true"),
        (".precision=bfloat16", "optimizer.use_distributed_optimizer=false"),
        (".precision=float32", "optimizer.use_distributed_optimizer=true"),
        (".precision=bfloat16", "optimizer.use_distributed_optimizer=false", "optimizer.optimizer=sgd"),
        (
            ".precision=bfloat16",
            "optimizer.use_distributed_optimizer=true",
            "optimizer.use_precision_aware_optimizer=true",
            "transformer_impl=transformer_engine",
        ),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_no_bit_changes_on_a_gpu(
    family: str, overrides: tuple[str, ...], share: float, model_folder: Callable[[str], Path]
) -> None:
    if any("precision_aware" in each for each in overrides):
        pytest.importorskip("transformer_engine")
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # where Megatron-Core keeps another test's choice of attention
    policy = make_policy("transformer_impl=torch", "optimizer.clip_grad=0.05", *SETTINGS, *overrides)
    resident, hosted = (build_model(policy, model_folder(family), num_steps=6) for _ in range(2))
    arena = HostArena(make_backend(), 1 << 30)
    assert hosted.optimizer is not None
    keep_on_host(hosted.optimizer, arena, share, bucket_bytes=1 << 15)
    assert arena.held_bytes > 0
    for number in range(4):
        assert take_step(hosted, number) == take_step(resident, number)
        assert same_tensors(weights_of(hosted), weights_of(resident))
        pairs = zip(state_of(hosted), state_of(resident), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    arena.close()


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Resumed]]:
    """Call a function of `rank_work` on the ranks of a layout, with the model of a family."""
    folders: dict[str, Path] = {}

    def on_ranks(layout: str, function: str, family: str, overrides: tuple[str, ...], *args: Any) -> list[Resumed]:
        if family not in folders:
            (folders[family],) = ranks(1).run("write", family, tmp_path_factory.mktemp(family))
        world_size, of_layout = LAYOUTS[layout]
        return ranks(world_size).run(function, folders[family], (*SETTINGS, *of_layout, *overrides), *args)

    return on_ranks


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "others", "overrides"),
    [
        ("qwen2", "dp2", ("one", "pp2"), (".precision=bfloat16", "optimizer.use_distributed_optimizer=true")),
        ("qwen2", "dp2", (), ("optimizer.use_distributed_optimizer=false",)),
        ("qwen2", "pp2", (), (".precision=bfloat16", "optimizer.use_distributed_optimizer=false")),
        ("qwen3_moe", "ep2", ("one",), (".precision=bfloat16", "optimizer.use_distributed_optimizer=true")),
        ("qwen3_moe", "etp2", ("one",), (".precision=bfloat16", "optimizer.use_distributed_optimizer=true")),
        (
            "qwen3_moe",
            "dp2",
            (),
            (
                "optimizer.use_distributed_optimizer=true",
                "distributed_data_parallel_config.overlap_grad_reduce=true",
                "distributed_data_parallel_config.overlap_param_gather=true",
            ),
        ),
    ],
)
def test_ranks_and_their_checkpoints_are_the_same_on_either_place(
    family: str,
    layout: str,
    others: tuple[str, ...],
    overrides: tuple[str, ...],
    run: Callable[..., list[Resumed]],
    tmp_path: Path,
) -> None:
    saved = {}
    for name, more in (
        ("device", ()),
        ("host", (ON_HOST,)),
        ("part", (ON_HOST, "optimizer.optimizer_offload_fraction=0.5")),
    ):
        (tmp_path / name).mkdir()
        saved[name] = run(layout, "train_and_save", family, (*overrides, *more), tmp_path / name)
    for name in ("host", "part"):
        assert [rank.metrics for rank in saved[name]] == [rank.metrics for rank in saved["device"]]
        assert [rank.digest for rank in saved[name]] == [rank.digest for rank in saved["device"]]
    for source, more in (("host", ()), ("device", (ON_HOST,)), ("host", (ON_HOST,))):
        files = {name: digest for rank in saved[source] for name, digest in rank.manifest.items()}
        resumed = run(layout, "load_and_train", family, (*overrides, *more), tmp_path / source, files)
        assert [rank.metrics for rank in resumed] == [rank.metrics for rank in saved["device"]]
        assert [rank.digest for rank in resumed] == [rank.digest for rank in saved["device"]]
    files = {name: digest for rank in saved["host"] for name, digest in rank.manifest.items()}
    for other in others:
        on_device, on_host = (
            run(other, "load_and_train", family, (*overrides, *more), tmp_path / "host", files)
            for more in ((), (ON_HOST,))
        )
        assert [rank.metrics for rank in on_host] == [rank.metrics for rank in on_device]
        assert [rank.digest for rank in on_host] == [rank.digest for rank in on_device]


NUM_STEPS = 6
OF_RUN = (
    "cluster.gpus_per_node=2",
    "policy.megatron_cfg.optimizer.use_distributed_optimizer=true",
    "policy.precision=bfloat16",
)


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    return start_run(folder, *settings(NUM_STEPS), *OF_RUN, *more, mark=str(folder))


@pytest.mark.sampled
@pytest.mark.slow
def test_a_run_that_is_killed_twice_and_goes_on_at_either_place_ends_as_one_on_the_device(tmp_path: Path) -> None:
    on_host = ("policy.megatron_cfg.optimizer.optimizer_cpu_offload=true",)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(whole)
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0, errors
    process = start(killed, *on_host)
    wait_for(lambda: any(killed.glob("checkpoints/step_2")), process)
    ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if is_rank(child)]
    assert len(ranks) == 2
    os.kill(random.Random(0).choice(ranks).pid, signal.SIGKILL)
    wait_for(lambda: any(killed.glob("checkpoints/step_4")), process)
    process.kill()
    process.communicate()
    wait_until_gone(str(killed))
    process = start(killed)
    errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0, errors
    assert differences(killed, whole, NUM_STEPS) == []
