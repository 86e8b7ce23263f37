from argparse import Namespace
from pathlib import Path

import make_docs
import pytest
import sft_beside_trl
from attempts import Ours
from sft_beside_trl import ATTEMPTS, PROMPT, completions, settings

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import check_config

OPTIONS = Namespace(tokens=1024, steps=3)
MODEL = PROJECT_ROOT / "examples/models/tiny_speller"


@pytest.mark.parametrize("name", [name for name, attempt in ATTEMPTS.items() if isinstance(attempt, Ours)])
def test_our_attempts_are_configurations(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_beside_trl, "NUM_SEQUENCES", 64)
    monkeypatch.setattr(sft_beside_trl, "PACK_TOKENS", 16_384)
    attempt = ATTEMPTS[name]
    assert isinstance(attempt, Ours)
    overrides = [*settings(MODEL, tmp_path / "train.jsonl", OPTIONS), *attempt.overrides]
    if "experts" in name:
        overrides.append("policy.model_name=Qwen/Qwen3-30B-A3B")
    checked = check_config(load_config(PROJECT_ROOT / "examples/configs/sft.yaml", overrides), name, run_here=False)
    policy = checked.config["policy"]
    assert policy["sequence_packing"]["train_mb_tokens"] == 16_384
    assert policy["megatron_cfg"]["fine_grained_activation_offloading"] == ("nothing" not in name)
    assert checked.config["data"]["prompt_template"] == f"{{question}}{PROMPT[1:]}"


def test_both_sides_have_the_same_completions_within_the_length() -> None:
    texts = list(completions(OPTIONS))
    assert texts == list(completions(OPTIONS))
    assert len(texts) == 3 * sft_beside_trl.NUM_SEQUENCES
    sizes = [len(PROMPT) + len(text) + 1 for text in texts]
    assert min(sizes) >= 256
    assert max(sizes) <= 1024


def test_the_table_has_a_row_for_each_attempt() -> None:
    good = {
        "name": "ours",
        "error": None,
        "memory": {"peak_device_bytes": 3 << 30, "peak_host_bytes": 1 << 29},
        "medians": {"tokens_per_s": 51_234.5, "timing/step_s": 0.75},
        "first_step_s": 12.0,
    }
    failed = {"name": "TRL float32", "error": "out of memory"}
    sizes = {"sequences": 64, "tokens": 1024, "pack_tokens": 16_384, "shape": "1.5b"}
    command = ["python", "sft_beside_trl.py", "--set", "policy.precision=float32", "--steps", "5"]
    result = {**sizes, "attempts": [good, failed], "command": command, "note": "Another program ran."}
    text = "\n".join(make_docs.sft_beside_trl({"sft_beside_trl_1.5b": result}))
    assert "| ours | 51,234 | 0.75 s | 3.0 GiB | 0.5 GiB | 12.0 s |" in text
    assert "| TRL float32 | out of memory |" in text
    assert "Shape `1.5b`, `precision=float32`, 64 sequences" in text
    assert text.endswith("Another program ran.\n")
