"""Checkpoints: a resumed run is the run that was never stopped, bit for bit; anything else is refused."""

import io
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from models import FAMILIES, make_batch, make_policy, read_model, same_tensors, take_step, weights_of
from torch import Tensor
from transformers import AutoTokenizer

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.tokenizer import make_byte_tokenizer
from nemo_rl_offload.errors import CheckpointError, ConfigError, ResourceError
from nemo_rl_offload.losses.nll import NegativeLogLikelihood
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.megatron.build.export import export_checkpoint
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.megatron.checkpoint import distributed as checkpoint
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.policy.worker import PolicyWorker
from nemo_rl_offload.runs.manifest import file_digest
from nemo_rl_offload.runs.run_directory import Checkpoints, open_run_directory

pytestmark = pytest.mark.usefixtures("megatron_process_group")

SCHEDULE = ("scheduler.lr_warmup_iters=3", "scheduler.lr_decay_style=cosine", "optimizer.weight_decay=0.1")
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
Build = Callable[..., MegatronModel]


@dataclass(frozen=True)
class Times(NegativeLogLikelihood):
    """A loss times a value."""

    value: float

    def __call__(self, logprobs: Tensor, batch: Any, norm: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().__call__(logprobs, batch, norm)
        return loss * self.value, metrics


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


@pytest.mark.sampled(1)
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


def test_a_run_that_was_made_longer_follows_its_present_schedule(
    model_folder: Callable[[str], Path], saved: Path
) -> None:
    def rates(num_steps: int, *, is_resumed: bool) -> list[float]:
        model = build_model(make_policy(*SCHEDULE), model_folder("qwen2"), num_steps=num_steps)
        if is_resumed:
            checkpoint.load(model, saved)
        else:
            model.scheduler.step(increment=1)
        found = []
        for _ in range(num_steps - 1):
            found += [group["lr"] for group in model.optimizer.param_groups]
            model.scheduler.step(increment=1)
        return found

    shorter = rates(6, is_resumed=True)
    model = build_model(make_policy(*SCHEDULE, "scheduler.lr_warmup_iters=0"), model_folder("qwen2"), num_steps=12)
    with pytest.warns(UserWarning, match="It decays until step 12, and did until 6: .*lr_decay_iters"):
        checkpoint.load(model, saved)
    longer = rates(12, is_resumed=True)
    assert longer == rates(12, is_resumed=False)
    assert longer[: len(shorter)] != shorter


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("optimizer", "distributed"), [("adam", "true"), ("adam", "false"), ("sgd", "false")])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_run_goes_on_with_the_rates_that_it_is_given_now(
    family: str, optimizer: str, distributed: str, build: Build, tmp_path: Path
) -> None:
    kind = (f"optimizer.use_distributed_optimizer={distributed}", f"optimizer.optimizer={optimizer}")
    now = (
        *kind,
        "optimizer.lr=0.02",
        "optimizer.min_lr=0.01",
        "optimizer.weight_decay=0.3",
        "scheduler.lr_warmup_iters=0",
    )

    def groups(model: MegatronModel) -> list[tuple[float, float]]:
        return [(group["lr"], group["weight_decay"]) for group in model.optimizer.param_groups]

    model = build(family, *kind)
    take_step(model, 0)
    checkpoint.save(model, tmp_path)
    resumed, fresh = build(family, *now), build(family, *now)
    with pytest.warns(UserWarning, match=r"goes on at 0\.0193 after 1 optimizer steps; by the [^:]*$"):
        checkpoint.load(resumed, tmp_path)
    fresh.scheduler.step(increment=1)
    for _ in range(5):
        assert groups(resumed) == groups(fresh)
        assert {decay for _, decay in groups(resumed)} <= {0.0, 0.3}
        for each in (resumed, fresh):
            each.scheduler.step(increment=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("distributed", ["true", "false"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_weights_alone_begin_a_run_anew(distributed: str, precision: str, build: Build, tmp_path: Path) -> None:
    """As if the exported weights had been loaded: no moments, no step, main weights like those of the model."""
    kind = (f"optimizer.use_distributed_optimizer={distributed}", f".precision={precision}")
    model = build("qwen2", *kind)
    for step in range(3):
        take_step(model, step)
    checkpoint.save(model, tmp_path)
    begun = build("qwen2", *kind)
    assert not same_tensors(weights_of(begun), weights_of(model))
    checkpoint.load_weights(begun, tmp_path)
    assert same_tensors(weights_of(begun), weights_of(model))
    assert begun.scheduler.num_steps == 0
    before = weights_of(begun)
    take_step(begun, 0)  # of rate 0, by which main weights of another model would show
    assert same_tensors(weights_of(begun), before)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen2", ("optimizer.use_distributed_optimizer=true", ".precision=bfloat16")),
        pytest.param("qwen3_moe", ("optimizer.use_distributed_optimizer=false",), marks=pytest.mark.slow),
        pytest.param(
            "qwen2", ("optimizer.use_distributed_optimizer=false", "optimizer.optimizer=sgd"), marks=pytest.mark.slow
        ),
        pytest.param("qwen2", ("optimizer.optimizer_cpu_offload=true", ".precision=bfloat16"), marks=pytest.mark.slow),
    ],
)
def test_without_the_optimizer_a_run_goes_on_as_with_these_weights_and_a_new_one(
    family: str, kind: tuple[str, ...], build: Build, tmp_path: Path
) -> None:
    (whole := tmp_path / "whole").mkdir()
    (alone := tmp_path / "alone").mkdir()
    model = build(family, *kind)
    for step in range(3):
        take_step(model, step)
    checkpoint.save(model, whole)
    checkpoint.Save(model, alone, copies=False, with_optimizer=False).finish()
    size, size_alone = (sum(file.stat().st_size for file in folder.iterdir()) for folder in (whole, alone))
    assert size_alone < 0.6 * size
    expected = build(family, *kind)
    checkpoint.load_weights(expected, whole)
    expected.scheduler.step(increment=3)
    resumed = build(family, *kind)
    with pytest.warns(UserWarning, match="alone is without the optimizer's state .* begins anew with these weights"):
        checkpoint.load(resumed, alone)
    assert same_tensors(weights_of(resumed), weights_of(model))
    assert resumed.scheduler.num_steps == 3
    assert [take_step(resumed, step) for step in (3, 4)] == [take_step(expected, step) for step in (3, 4)]
    assert same_tensors(weights_of(resumed), weights_of(expected))
    checkpoint.load(continued := build(family, *kind), whole)
    for step in (3, 4):
        take_step(continued, step)
    assert not same_tensors(weights_of(resumed), weights_of(continued)), "the optimizer's state matters"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("waits_on_host", ["false", "true"])
def test_a_worker_and_its_reference_begin_with_another_runs_weights(waits_on_host: str, tmp_path: Path) -> None:
    optimizer = "policy.megatron_cfg.optimizer"
    config: Any = load_config(
        PROJECT_ROOT / "examples/configs/grpo_tiny.yaml",
        [
            *("policy.precision=bfloat16", "policy.megatron_cfg.fine_grained_activation_offloading=false"),
            *(f"{optimizer}.lr=0.01", f"{optimizer}.optimizer_cpu_offload={waits_on_host}"),
            "policy.megatron_cfg.scheduler.lr_warmup_iters=1",  # whose first step has rate 0
        ],
    )
    model, batch = PROJECT_ROOT / config["policy"]["model_name"], make_batch(0)
    del batch["token_mask"], batch["sample_mask"]
    training = {**make_batch(0), "advantages": torch.ones(batch["input_ids"].shape)}

    def make() -> PolicyWorker:
        return PolicyWorker(config["policy"], model, seed=1, num_steps=6, keep_reference=True)

    def train(worker: PolicyWorker) -> None:
        worker.train(training, "nll", {}, normalizers(training))

    first = make()
    for _ in range(3):
        train(first)
    first.start_checkpoint(tmp_path, in_background=False)
    manifest = first.finish_checkpoint()
    expected = first.get_logprobs(batch)
    second = make()
    assert not np.array_equal(second.get_logprobs(batch), expected)
    second.load_start_weights(tmp_path, manifest)
    train(second)
    assert np.array_equal(second.get_logprobs(batch), expected), "main weights are those of the checkpoint too"
    for _ in range(2):
        train(second)
    assert not np.array_equal(second.get_logprobs(batch), expected)
    assert np.array_equal(second.get_reference_policy_logprobs(batch), expected)


def test_steps_during_a_save_are_not_in_it(build: Build, tmp_path: Path) -> None:
    model = build("qwen2")
    take_step(model, 0)
    at_save = weights_of(model)
    save = checkpoint.Save(model, tmp_path, copies=True)
    expected = take_step(model, 1)
    final = weights_of(model)
    manifest = save.finish()
    assert set(manifest) == {path.name for path in tmp_path.iterdir()}
    assert save.is_written
    resumed = build("qwen2")
    checkpoint.verify(tmp_path, manifest)
    checkpoint.load(resumed, tmp_path)
    assert same_tensors(weights_of(resumed), at_save)
    assert take_step(resumed, 1) == expected
    assert same_tensors(weights_of(resumed), final)


def test_random_numbers_go_on(build: Build, tmp_path: Path) -> None:
    def draw() -> list[torch.Tensor]:
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(3)
        return [inside, torch.rand(3)]

    model = build("qwen2")
    take_step(model, 0)
    draw()
    checkpoint.save(model, tmp_path)
    expected, later = draw(), draw()
    checkpoint.load(model, tmp_path)
    assert all(map(torch.equal, draw(), expected))
    assert not any(map(torch.equal, expected, later))


def test_a_step_that_is_not_finite_is_as_if_it_never_was(build: Build, tmp_path: Path) -> None:
    model, undisturbed = build("qwen2"), build("qwen2")
    for each in (model, undisturbed):
        take_step(each, 0)
    before = weights_of(model)
    batch = make_batch(1)
    for value in (float("nan"), float("inf")):
        metrics = train_step(model, batch, Times(value), normalizers(batch), 2, LogitsHeadFactory(1.0))
        assert metrics["skipped_updates"] == 1
        assert same_tensors(weights_of(model), before)
    expected = take_step(undisturbed, 2)
    assert expected["skipped_updates"] == 0
    assert take_step(model, 2) == expected
    assert same_tensors(weights_of(model), weights_of(undisturbed))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_exported_checkpoint_is_a_model_of_transformers(
    family: str, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source, own = model_folder(family, vocab_size=264), tmp_path / "own"
    make_byte_tokenizer(own)
    config: Any = load_config(
        PROJECT_ROOT / "examples/configs/grpo_tiny.yaml",
        [
            f"policy.model_name={source}",
            f"policy.tokenizer.name={own}",
            f"policy.tokenizer.chat_template='{TEMPLATE}'",
            "data.prompt_template=null",
            "policy.megatron_cfg.fine_grained_activation_offloading=false",
            "policy.megatron_cfg.optimizer.lr=1e-2",
        ],
    )
    model = build_model(config["policy"], source, num_steps=6)
    take_step(model, 0)
    take_step(model, 1)  # the first is one of the warm-up, of rate 0
    with open_run_directory(tmp_path / "run", tmp_path, config) as run_dir:
        saved: list[checkpoint.Manifest] = []

        def write(folder: Path) -> None:
            folder.mkdir()
            saved.append(checkpoint.save(model, folder))

        checkpoints = Checkpoints(run_dir, None, True)
        checkpoints.begin(2, write)
        folder = checkpoints.commit(2, {}, None, saved.pop)
    notes = export_checkpoint(run_dir / "step_2", tmp_path / "exported")
    told = f"{tmp_path}/exported: the tokenizer is another one beside this model's config.json: as Qwen2Tokenizer, it"
    assert [note.startswith(told) for note in notes] == ([True] if family == "qwen2" else [])
    batch = make_batch(3)
    del batch["token_mask"], batch["sample_mask"]
    batch["input_lengths"][:] = batch["input_ids"].shape[1]
    logits = read_model(tmp_path / "exported", family)(batch["input_ids"]).logits
    start_logits = read_model(source, family)(batch["input_ids"]).logits
    expected = compute_logprobs(model, batch, 2, LogitsHeadFactory(1.0))
    assert expected is not None
    found = logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    assert torch.allclose(found, expected[:, 1:], atol=2e-5)  # float32, operations in another order
    assert (logits - start_logits).abs().max() > 1e-3, "training shows"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user] hi<|im_end|>"
    export_checkpoint(run_dir / "step_2", tmp_path / "half", "bfloat16")
    half, found = FAMILIES[family][1].from_pretrained(tmp_path / "half", output_loading_info=True)
    assert not any(found.values()), found
    assert half.dtype == torch.bfloat16, "as its config.json says"
    assert half.generation_config.eos_token_id == 256
    assert half.generation_config.pad_token_id == 257
    for name, weight in read_model(tmp_path / "exported", family).named_parameters():
        assert torch.equal(half.get_parameter(name), weight.bfloat16())
    with pytest.raises(ConfigError, match="exported: exists already"):
        export_checkpoint(folder, tmp_path / "exported")
    with pytest.raises(CheckpointError, match=f"{run_dir}: is a run, with step_2. Give .* {run_dir}/step_2"):
        export_checkpoint(run_dir, tmp_path / "out")
    with pytest.raises(CheckpointError, match=f"step_3: there is no such checkpoint. {run_dir} has: step_2"):
        export_checkpoint(run_dir / "step_3", tmp_path / "other")


def test_megatron_refuses_to_distribute_sgd(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"policy.megatron_cfg.optimizer: .*Only Adam"):
        build("qwen2", "optimizer.optimizer=sgd", "optimizer.use_distributed_optimizer=true")


def test_weights_alone_are_read_as_an_export_does(build: Build, model_folder: Any, saved: Path, tmp_path: Path) -> None:
    model = build_model(make_policy(), model_folder("qwen2"), num_steps=None)
    checkpoint.load(model, saved)
    whole = build("qwen2")
    checkpoint.load(whole, saved)
    assert same_tensors(weights_of(model), weights_of(whole))
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    put_code(folder, "common", tmp_path / "canary")
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        checkpoint.load(model, folder)
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp"])
def test_links_and_pipes_in_a_checkpoint_are_not_followed(name: str, build: Build, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    manifest = {path.name: file_digest(path) for path in folder.iterdir()}
    model = build("qwen2")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    for read in (lambda: checkpoint.verify(folder, manifest), lambda: checkpoint.load(model, folder)):
        with pytest.raises(CheckpointError, match=rf"{folder}.*{name} cannot be read: it is a link, and no plain file"):
            read()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for read in (lambda: checkpoint.verify(folder, manifest), lambda: checkpoint.load(model, folder)):
        with pytest.raises(CheckpointError, match=rf"{folder}.*{name} cannot be read: it is a pipe, and no plain file"):
            read()


def test_a_part_that_the_manifest_does_not_name_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    manifest = {path.name: file_digest(path) for path in folder.iterdir()}
    (folder / ".nfs0001").touch()
    checkpoint.verify(folder, manifest)
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    with pytest.raises(CheckpointError, match=rf"{folder} is damaged: __1_0\.distcp is not named in the manifest"):
        checkpoint.verify(folder, manifest)


def test_missing_folder(build: Build, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'nothing'} is not a checkpoint"):
        checkpoint.load(build("qwen2"), tmp_path / "nothing")


def test_a_changed_file_is_told_before_anything_is_read(build: Build, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    manifest = {path.name: file_digest(path) for path in folder.iterdir()}
    data = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{folder} is damaged: the content of {data.name} is not what was"):
        checkpoint.verify(folder, manifest)


def test_a_file_that_grows_too_large_is_a_full_disk(build: Build, tmp_path: Path) -> None:
    model = build("qwen2")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limit[1]))
    try:
        with pytest.raises(ResourceError, match=f"Cannot write the checkpoint {tmp_path}: .*File too large"):
            checkpoint.save(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_that_is_gone_is_no_full_disk(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"Cannot write the checkpoint .*: FileNotFoundError") as error:
        checkpoint.save(build("qwen2"), tmp_path / "gone")
    assert "No space left" not in str(error.value)


def test_truncated_file(build: Build, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    data = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=rf"{data} \(.*\) is damaged: it ends too early"):
        checkpoint.load(build("qwen2"), folder)


class Gadget:
    """Runs a program where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def put_code(folder: Path, place: str, canary: Path) -> None:
    """Write a gadget to a part of a checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if place == "common.pt":
        torch.save(Gadget(canary), folder / place)
    elif place == ".metadata":
        metadata.planner_data = Gadget(canary)
    else:
        stream = io.BytesIO()
        value: Any = [Gadget(canary)]
        if place == "layer":
            value = [{"model0": {"decoder.layers.0.self_attention.core_attention._extra_state": torch.ones(1)}}]
        torch.save(value, stream, _use_new_zipfile_serialization=place != "legacy")
        name = {"random": "random_state", "weight": "embedding"}.get(place, "common_state")
        ((index, info),) = [pair for pair in metadata.storage_data.items() if pair[0].fqn.startswith(name)]
        content = (folder / info.relative_path).read_bytes()
        (folder / info.relative_path).write_bytes(content + stream.getvalue())
        metadata.storage_data[index] = replace(info, offset=len(content), length=len(stream.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (".metadata", r"\.metadata names posix\.system, which no checkpoint .* Nothing of it was run\."),
        ("common.pt", r"common\.pt: no part of a checkpoint that this program writes"),
        ("common", r"__0_0\.distcp \(common_state/shard_0_1\) names posix\.system, which"),
        ("legacy", r"__0_0\.distcp \(common_state/shard_0_1\) is damaged: it is no archive of torch"),
        ("layer", r"__0_0\.distcp \(common_state/shard_0_1\) is damaged: it is not made of layout, optimizer, sch"),
        ("random", r"__0_0\.distcp \(random_state/shard_0_1\) names posix\.system, which"),
        ("weight", r"__0_0\.distcp \(embedding\.word_embeddings\.weight\) names posix\.system, which"),
    ],
)
def test_code_in_a_checkpoint_is_refused_by_name(
    place: str, message: str, build: Build, saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    put_code(folder, place, tmp_path / "canary")
    with pytest.raises(CheckpointError, match=rf"^{folder}/{message}") as caught:
        checkpoint.load(build("qwen2"), folder)
    assert len(str(caught.value).splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_another_model(family: str, build: Build, saved: Path) -> None:
    model = build(family)
    with pytest.raises(CheckpointError, match=f"{saved} cannot be read into this model") as caught:
        checkpoint.load(model, saved)
    assert "Has the model in policy.model_name changed" in str(caught.value)
    assert "shape mismatch" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
