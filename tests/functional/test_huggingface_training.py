"""Offloading under transformers' Trainer, TRL's trainers and FSDP2: the same weights come out."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from huggingface_models import DENSE_NAMES, DEVICE, all_came_back, gradients, identical, make_batch, make_model, offload

from nemo_rl_offload import OffloadCallback
from nemo_rl_offload.config.loader import PROJECT_ROOT

NAMES = ["core_attn", "mlp_norm", "mlp_act"]


@pytest.fixture(autouse=True)
def _same_sums_on_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Kernels and threads that sum in any order would differ from run to run."""
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 1)  # else several mean nn.DataParallel
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.chdir(tmp_path)
    torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)  # some have no such form
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(False)


def callback(modules: list[str]) -> OffloadCallback:
    return OffloadCallback(modules, host_memory_budget="64MiB", min_tensor_bytes=0)


def arguments(**changes: Any) -> dict[str, Any]:
    common = {"output_dir": "out", "report_to": [], "disable_tqdm": True, "use_cpu": DEVICE == "cpu", "seed": 1}
    common |= {"per_device_train_batch_size": 2, "max_steps": 2, "save_strategy": "no", "logging_strategy": "no"}
    return common | {"bf16": False, "gradient_checkpointing": False} | changes


def assert_same_weights(left: Any, right: Any) -> None:
    assert identical([*left.parameters()], [*right.parameters()])


def train(callbacks: list[Any], **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{name: each[0].cpu() for name, each in make_batch(9, seed).items()} for seed in range(8)]
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "full_determinism": False}
    model = make_model("llama", num_hidden_layers=3)
    trainer = Trainer(
        model,
        TrainingArguments(**arguments(**settings, **changes)),
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=callbacks,
    )
    trainer.train()
    return model


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
    ("modules", "changes"),
    [
        (NAMES, {}),
        pytest.param(NAMES, {"bf16": True}, marks=pytest.mark.slow),
        (["model.layers.*"], {"gradient_checkpointing": True}),
        (
            ["model.layers.*"],
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        ),
    ],
)
def test_trainer(modules: list[str], changes: dict[str, Any]) -> None:
    active = callback(modules)
    assert_same_weights(train([active], **changes), train([], **changes))
    stats = active.stats()
    assert all(stats.per_module[each].num_groups == 3 * 2 * 2 for each in modules)  # layers, microbatches, steps
    assert all_came_back(stats)
    assert stats.host_bytes == stats.host_capacity_bytes == 0


def test_copies_of_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 2)
    with pytest.raises(ValueError, match=r"nn\.DataParallel.*torchrun"):
        train([callback(NAMES)])


def test_a_training_after_one_that_failed() -> None:
    active = callback(NAMES)
    assert active.stats().bytes_out == 0
    model = make_model("llama")
    num_bytes = []
    for _ in range(2):  # the first begins, and never ends
        active.on_train_begin(None, None, None, model=model)
        gradients(model, [make_batch(5)])
        num_bytes.append(active.stats().bytes_out)
    active.on_train_end(None, None, None)
    gradients(model, [make_batch(5)])
    assert num_bytes[0] == num_bytes[1] == active.stats().bytes_out > 0


SPELLER = PROJECT_ROOT / "examples/models/tiny_speller"
TEXTS = {"prompt": "number {}", "chosen": "is {}", "rejected": "was not", "completion": "is {}", "text": "number {}"}
SAMPLED: dict[str, Any] = {"max_completion_length": 6}
METHODS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "SFT": (["text"], {}),
    "DPO": (["prompt", "chosen", "rejected"], {}),
    "Reward": (["chosen", "rejected"], {}),
    "KTO": (["prompt", "completion"], {}),
    "GRPO": (["prompt"], {**SAMPLED, "num_generations": 2}),
    "RLOO": (["prompt"], {**SAMPLED, "num_generations": 2}),
    "Distillation": (["prompt"], SAMPLED),
}
"""TRL's trainers, with the columns that each reads and what it needs set."""


def letter_sums(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text))) for text in completions]


def trl_trainer(method: str, callbacks: list[Any], weights: str = "full", **changes: Any) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import BitsAndBytesConfig

    columns, settings = METHODS[method]
    rows = [{column: TEXTS[column].format(i) for column in columns} | {"label": i % 2 == 0} for i in range(8)]
    more: dict[str, Any] = {}
    if method in ("GRPO", "RLOO"):
        more["reward_funcs"] = letter_sums
    if method == "Distillation":
        more["teacher_model"] = make_model("llama", vocab_size=264)
    if weights != "full":
        more["peft_config"] = pytest.importorskip("peft").LoraConfig()
    if weights == "4-bit":
        pytest.importorskip("bitsandbytes")
        more["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True)
    return getattr(trl, f"{method}Trainer")(
        str(SPELLER),
        args=getattr(trl, f"{method}Config")(**arguments(learning_rate=1e-3, **settings, **changes)),
        train_dataset=Dataset.from_list(rows),
        callbacks=callbacks,
        **more,
    )


def train_with_trl_alike(method: str, modules: list[str], **changes: Any) -> Any:
    """Train with and without the callback, and return the model of the latter."""
    active = callback(modules)
    models = []
    for callbacks in ([active], []):
        trainer = trl_trainer(method, callbacks, **changes)
        trainer.train()
        models.append(trainer.model)
    assert_same_weights(*models)
    stats = active.stats()
    assert all(stats.per_module[each].bytes_out > 0 for each in modules)
    assert all_came_back(stats)
    assert stats.host_bytes == stats.host_capacity_bytes == 0
    return models[1]


@pytest.mark.parametrize("weights", ["full", "LoRA", "4-bit"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:::trl")
def test_trl(method: str, weights: str) -> None:
    model = train_with_trl_alike(method, NAMES, weights=weights)
    assert any(each.dtype == torch.uint8 for each in model.parameters()) == (weights == "4-bit")


@pytest.mark.parametrize(
    ("method", "modules", "changes"),
    [
        ("SFT", [*NAMES, "**.layers.*"], {"gradient_checkpointing": True}),
        (
            "SFT",
            ["**.layers.*"],
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        ),
        ("SFT", NAMES, {"packing": True, "max_length": 32}),
        ("DPO", ["**.layers.*"], {"gradient_checkpointing": True, "precompute_ref_log_probs": True}),
        ("GRPO", NAMES, {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 3}),
    ],
)
@pytest.mark.filterwarnings("ignore:::trl")
def test_settings_of_trl(method: str, modules: list[str], changes: dict[str, Any]) -> None:
    train_with_trl_alike(method, modules, weights="LoRA", **changes)


def test_one_callback_in_a_training_and_its_resumption() -> None:
    active = callback(NAMES)
    models, num_bytes = [], []
    for callbacks in ([active], []):
        trainer = trl_trainer("SFT", callbacks, save_strategy="steps", save_steps=1)
        for checkpoint in (None, "out/checkpoint-1"):
            trainer.train(resume_from_checkpoint=checkpoint)
            num_bytes.append(active.stats().bytes_out)
        models.append(trainer.model)
    assert_same_weights(*models)
    assert num_bytes[0] == 2 * num_bytes[1] > 0  # steps


def test_trls_own_offloading_is_refused() -> None:
    trainer = trl_trainer("SFT", [callback(NAMES)])
    trainer.args.activation_offloading = True  # from the beginning, it needs an accelerator
    with pytest.raises(ValueError, match=r"activation_offloading=False"):
        trainer.train()


def test_a_head_that_trl_does_not_call_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"'lm_head' offloaded nothing: no such module was called.*its weight"):
        trl_trainer("SFT", [callback(["lm_head"])]).train()


def shard_and_train(rank: int, port: int, folder: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results = []
    cases = [(None, None), (True, torch.bfloat16), (False, torch.bfloat16)]
    for use_reentrant, param_dtype in cases:
        model = make_model("qwen3")
        policy = MixedPrecisionPolicy(param_dtype=param_dtype)
        for part in (*model.model.layers, model):
            fully_shard(part, mp_policy=policy)
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        batches = [make_batch(11, seed=rank), make_batch(6, seed=rank)]
        expected = [each.to_local() if hasattr(each, "to_local") else each for each in gradients(model, batches)]
        for modules in (["model.layers.*"], [*DENSE_NAMES])[: 1 if use_reentrant else 2]:
            with offload(model, modules) as active:
                got = [each.to_local() if hasattr(each, "to_local") else each for each in gradients(model, batches)]
            stats = active.stats()
            moved = all(stats.per_module[each].bytes_out > 0 for each in modules)
            results.append(identical(got, expected) and moved and stats.host_bytes == 0)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks on the CPU")
def test_fsdp2_on_two_ranks(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(shard_and_train, args=(port, tmp_path), nprocs=2)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [True] * 5
