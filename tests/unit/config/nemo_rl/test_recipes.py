"""NeMo-RL's own recipes pass a check, or are refused by the name of a feature; whatever is changed in them is named.

The recipes are data beside the project and not a part of it: without them, these tests are skipped.
"""

import copy
import os
import random
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.cli.check import as_text, check_file
from nemo_rl_offload.config.loader import PROJECT_ROOT, read_config
from nemo_rl_offload.config.nemo_rl.table import rows
from nemo_rl_offload.config.nemo_rl.translation import ESTIMATORS
from nemo_rl_offload.config.recipe import read_recipe, translated
from nemo_rl_offload.config.rules import machine
from nemo_rl_offload.config.rules.vllm import SET_HERE
from nemo_rl_offload.config.sources import LoadedConfig
from nemo_rl_offload.config.validation import Findings, examine

FOLDER = PROJECT_ROOT.parent / "shared" / "nemo_rl_recipes"
NUM_FUZZED = int(os.environ.get("NUM_FUZZED_RECIPES", "12"))
"""2,000 by hand: NUM_FUZZED_RECIPES=2000 pytest tests/unit/config/nemo_rl/test_recipes.py."""
FEATURES = {
    *(row.feature for row in rows().values() if row.feature),
    *SET_HERE.values(),
    *(feature for feature, _ in ESTIMATORS.values()),
    *("generation by SGLang", "generation by TensorRT-LLM", "generation by Dynamo", "a server for other programs"),
    *("NeMo-Gym with distillation", "NeMo-Gym with Megatron-Core's generation", "several traces of an episode"),
    *("rewards by effort", "collecting trajectories"),
    *("another config.json", "another optimizer", "another schedule", "raw text"),
    *("experts over several engines", "vLLM with gated delta nets", "quantization of linears' inputs"),
    *("LoRA of a model with gated delta nets", "LoRA beside a hybrid model's layers for further tokens"),
    *("quantized weights with vLLM", "sliding windows in some layers with vLLM", "scaled scores of YaRN with vLLM"),
    *("other positions of two kinds of layers with vLLM", "biases of attention with vLLM"),
    *("LoRA of experts in fewer elements", "an overlap of experts in fewer elements with shared ones"),
    *("further multi-token prediction", "cross-tokenizer distillation"),
    *("several data sets", "another processor of records", "a learned opening of turns"),
    *("data behind an address", "a sampler of one's own", "batches by data set"),
    *("a data set class of one's own", "another value for each data set", "repeated records"),
    *("a limit for whole records", "asynchronous GRPO by Megatron-Core"),
    *("router replay without GRPO", "router replay of generation by Megatron-Core"),
    *("router replay of engines with pipeline parallelism", "router replay beside layers for further tokens"),
    "router replay of sinkhorn balancing",
    *("LoRA of a tied output layer", "LoRA of some layers by DTensor", "LoRA of a model with experts by DTensor"),
    *("LoRA of out_proj by DTensor", "drafts by another method", "drafts by the model's own layer"),
    *("MXFP8 in generation", "weights in 8 bits", "LoRA beside linears in 8 bits", "delayed scaling"),
    *("8 bits in layers with states of the model", "engines in 8 bits of a model with states"),
    *("generation in 8 bits by Megatron-Core", "FP8 unlike the student's", "Transformer Engine's layers"),
}
NOT_YET = (
    r"model_type '\w+' of config.json is not trained here",
    r"of config.json is not taken in a \w+\. Allowed: ",
    r"does not divide the model's \d+ key heads of attention, whose output has a gate",
    r"must be true. Megatron-Core is the only training backend",
    r"cannot read the file: No such file",  # inherited from beside the recipes
    r"quant_configs/\w+\.yaml' is not there",
    r"missing value, while data\.train\.path is given",
    r"policy.tokenizer.name says it",
    r"Environment variable '\w+' not found",
)
"""Messages of rules that hold for any configuration."""


def recipes() -> list[Path]:
    return sorted(FOLDER.rglob("*.yaml"))


needs_recipes = pytest.mark.skipif(not recipes(), reason="NeMo-RL's recipes are not beside the project")


@needs_recipes
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * bool(number % 8)) for number, path in enumerate(recipes())],
    ids=lambda path: path.stem,
)
def test_a_recipe_passes_or_is_refused_by_a_feature(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "PERSISTENT_CACHE"):  # of a cluster, which some recipes name
        monkeypatch.setenv(name, "/cache")
    found = check_file(path, [])
    for problem in found.problems:
        if match := re.search(r"^(?:.* asks for )?(.+?), not supported here: ", problem.message):
            assert match[1] in FEATURES, problem
        is_named = ", not supported here: " in problem.message or any(
            re.search(text, problem.message) for text in NOT_YET
        )
        assert is_named, problem
    assert sum("no effect" in line for line in as_text(path, found).splitlines()) <= 1 + len(found.problems)


@cache
def _merged(path: Path) -> LoadedConfig:
    return read_config(path, whole=True)


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            yield from leaves(value, (*path, key))


def _examined(loaded: LoadedConfig, values: dict[str, Any]) -> Findings:
    return examine(translated(LoadedConfig(values, loaded.origins, references=loaded.references), None), run_here=False)


@needs_recipes
def test_what_is_changed_in_a_recipe_is_named() -> None:
    """A key that is dropped has its default; one that is misspelt, or of another type, is named."""
    free = ("env.nemo_gym", "policy.generation.trtllm", "policy.generation.sglang", "env.reasoning_gym.params")
    free += ("policy.generation.vllm_kwargs.", "policy.tokenizer.chat_template_kwargs", "policy.dtensor_cfg.env_vars.")
    rng = random.Random(1)
    files = rng.choices(recipes(), k=2 * NUM_FUZZED)
    can_be_read = (each for each in files if not any("cannot read" in str(it) for it in check_file(each, []).problems))
    for file in islice(can_be_read, NUM_FUZZED):
        loaded = _merged(file)
        values = copy.deepcopy(loaded.values)
        path = rng.choice([each for each in leaves(values) if ".".join(each) in loaded.origins])
        name, section = ".".join(path), values
        for part in path[:-1]:
            section = section[part]
        how = rng.choice(("drop", "misspell", "type"))
        before = section.pop(path[-1])
        if how == "misspell":
            section[path[-1] + "q"] = before
        elif how == "type":
            section[path[-1]] = {"strange": 1} if not isinstance(before, dict) else "strange"
        found = _examined(loaded, values)
        said = " ".join(str(each) for each in [*found.problems, *found.warnings, *found.without_effect])
        as_text(Path("recipe.yaml"), found, verbose=True)
        if (
            how == "drop"
            or name.startswith(free)
            or any(f"{name}.".startswith(f"{row.path}.") for row in rows().values() if row.is_open)
        ):
            continue
        wanted = name + "q" if how == "misspell" else name
        assert wanted in said, (how, name, before)


def commands_for_a_small_machine() -> dict[str, list[str]]:
    """The words of each command of the page, by its algorithm, with what it names by variables."""
    page = (PROJECT_ROOT / "docs" / "from-nemo-rl.md").read_text()
    text = page.partition("## On a small machine\n")[2].partition("<!-- Below")[0]
    blocks = [shlex.split(block.replace("\\\n", "")) for block in re.findall(r"```\n(.*?)```", text, re.DOTALL)]
    (small,) = [word.removeprefix("SMALL=").split() for word in blocks[0] if word.startswith("SMALL=")]
    configs = str(FOLDER / "configs")
    words = [[each.replace("$CONFIGS", configs) for each in block] for block in blocks[1:]]
    return {block[2]: [inner for each in block for inner in (small if each == "$SMALL" else [each])] for block in words}


@needs_recipes
@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo", "distillation"])
def test_the_commands_for_a_small_machine_can_be_run(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "have_transformer_engine", lambda: False)
    program, command, _, option, config, *others = commands_for_a_small_machine()[algorithm]
    assert (program, command, option, others[0]) == ("nemo-rl-offload", "run", "--config", "--run-dir")
    found = examine(read_recipe(config, others[2:], algorithm), run_here=True)
    assert found.problems == []
    assert {warning.path for warning in found.warnings} <= {"loss_fn.reference_policy_kl_penalty"}
