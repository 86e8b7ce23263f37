"""Every Python snippet of docs/offload.md runs, on a tiny model."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import DEVICE, all_came_back, make_batch, make_model

from nemo_rl_offload.config.loader import PROJECT_ROOT

SNIPPETS = re.findall(r"```python\n(.*?)```", (PROJECT_ROOT / "docs/offload.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)  # else several mean nn.DataParallel
    # Tokens enough for tensors of 1 MiB in the activation and in attention, as the defaults ask for.
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    model = make_model("llama", **shape)
    batches = [make_batch(768, num_rows=3)]
    rows = [{name: each[1].cpu() for name, each in make_batch(768, seed).items()} for seed in range(3)]
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    names: dict[str, Any] = {
        "model": model,
        "batches": batches,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": rows,
        "training_args": TrainingArguments(
            str(tmp_path), per_device_train_batch_size=3, max_steps=1, use_cpu=DEVICE == "cpu", **quiet
        ),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="offload_activations")
        exec(compile(snippet, "docs/offload.md", "exec"), names)
    stats = names["offload"].stats()
    assert all_came_back(stats)
    assert stats.host_bytes == 0


def test_the_page_has_its_snippets() -> None:
    assert len(SNIPPETS) == 5
