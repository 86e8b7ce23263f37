"""Our exemplars in NeMo-RL's typed configuration: each key of NeMo-RL's stands where it stands there, with a value of
its type, and each other key is known to be ours alone.

An exemplar of ours is laid over NeMo-RL's of the same algorithm, which has what it leaves out, and NeMo-RL's own
classes, read from its sources, validate the whole. `NEMO_RL_SOURCE` names a checkout of
https://github.com/NVIDIA-NeMo/RL; without it this is skipped.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel, TypeAdapter, ValidationError
from typed_classes import find

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config, read_config

SOURCE = Path(os.environ.get("NEMO_RL_SOURCE", ""))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(Path() == SOURCE, reason="NEMO_RL_SOURCE names no checkout of NeMo-RL to compare with"),
]
CONFIGS = PROJECT_ROOT / "examples/configs"
BASE = CONFIGS / "base.yaml"
EXEMPLARS = sorted(set(CONFIGS.glob("*.yaml")) - {BASE})
THEIRS = {"grpo": "grpo_math_1B", "sft": "sft", "dpo": "dpo", "distillation": "distillation_math"}
"""By algorithm: the exemplar of NeMo-RL's that has what an exemplar of ours leaves out."""
OURS = {
    "algorithm": "a program of its own there",
    "data.env_name": "for all data sets; there each has one, or data.default",
    "data.prompt_template": "the shipped tiny models have no chat template",
    "data.validation.exclude": "generated problems",
    "dpo.max_val_samples": "validation goes over so many samples, there over so many batches",
    "sft.max_val_samples": "validation goes over so many samples, there over so many batches",
    "env": "named there by the data set's configuration; sft has none",
    "eval": "a program of its own there, with a file of its own",
    "policy.megatron_cfg.activation_offload": "this project's engine",
    "policy.megatron_cfg.min_offloaded_tensor_size": "Megatron-Core's name, which NeMo-RL has no key for",
    "policy.megatron_cfg.moe_aux_loss_coeff": "Megatron-Core's name, which NeMo-RL passes on without a type",
}
"""Keys and sections of exemplars that NeMo-RL's have not."""
_OF_MEGATRON = """
activation_checkpointing recompute_granularity apply_rope_fusion bias_activation_fusion gradient_accumulation_fusion
attention_backend cuda_graph_modules fused_linear_logprobs_chunk_size moe_flex_dispatcher_backend
moe_shared_expert_overlap mtp_num_layers mtp_loss_scaling_factor mtp_detach_heads
"""
NULLS = {
    f"{section}.{key}": why
    for section, keys, why in (
        ("checkpointing", "checkpoint_dir", "the run directory says it"),
        *((algorithm, "max_num_epochs", "no such end") for algorithm in ("grpo", "sft", "distillation")),
        *((f"logger.{tracker}", "name", "the run directory's") for tracker in ("wandb", "swanlab")),
        *((f"data.{split}", "input_key output_key split", "usual names") for split in ("train", "validation")),
        ("teacher", "logprob_batch_size precision", "the policy's"),
        ("policy.generation.vllm_cfg", "precision max_model_len env_vars", "the policy's"),
        ("policy.megatron_cfg.scheduler", "start_weight_decay end_weight_decay", "weight_decay's"),
        ("policy.megatron_cfg", _OF_MEGATRON, "what the model, the machine or Megatron-Core says"),
    )
    for key in keys.split()
}
"""Keys that are null here where nobody gives a value; NeMo-RL's types take no null, and its exemplar's value counts."""
SET_BY_ITS_PROGRAM = {"policy.generation.vllm_cfg.skip_tokenizer_init": "required, and in no exemplar of NeMo-RL's"}
OTHER_VALUES = {"cluster.gpus_per_node": "auto: all of the machine's, which its user need not count"}


def type_of(algorithm: str) -> Any:
    return find(SOURCE, f"nemo_rl.algorithms.{algorithm}", "MasterConfig")


def type_of_vllm() -> Any:
    return find(SOURCE, "nemo_rl.models.generation.vllm.config", "VllmConfig")


def exemplar_of(algorithm: str) -> dict[str, Any]:
    """NeMo-RL's, resolved, but for what is computed: its resolvers are not here, and the numbers do not matter."""
    for resolver in ("mul", "div", "max"):
        OmegaConf.register_new_resolver(resolver, lambda *_: 1, replace=True)
    parts = [OmegaConf.load(SOURCE / f"examples/configs/{THEIRS[algorithm]}.yaml")]
    while parent := parts[0].pop("defaults", None):
        parts.insert(0, OmegaConf.load(SOURCE / "examples/configs" / parent))
    found: Any = OmegaConf.to_container(OmegaConf.merge(*parts), resolve=True)
    return dict(found)


def has_key(annotation: Any, keys: Sequence[str]) -> bool:
    """Whether a type has such a key, below which the others are."""
    if not keys or annotation in (Any, dict) or get_origin(annotation) is dict:
        return True
    if get_origin(annotation) in (Union, UnionType):
        return any(has_key(each, keys) for each in get_args(annotation))
    if get_origin(annotation) is list:
        return has_key(get_args(annotation)[0], keys[1:])
    found: Mapping[str, Any] = {}
    if is_typeddict(annotation):
        found = get_type_hints(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found = {name: field.annotation for name, field in annotation.model_fields.items()}
    return keys[0] in found and has_key(found[keys[0]], keys[1:])


def value_at(values: Any, path: str) -> Any:
    """None too where nothing is."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def written(exemplar: Path) -> list[str]:
    """The keys that an exemplar has itself, or from another than the file of all defaults."""
    paths = [path for path, place in read_config(exemplar).origins.items() if f"{BASE.name}:" not in place]
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


def ours_alone(exemplar: Path) -> set[str]:
    """The written keys that NeMo-RL has neither in its types nor in its exemplar."""
    algorithm = load_config(exemplar)["algorithm"]
    theirs = exemplar_of(algorithm)
    return {
        path
        for path in written(exemplar)
        if not has_key(type_of(algorithm), path.split("."))
        and not (path.startswith("policy.generation.") and has_key(type_of_vllm(), path.split(".")[2:]))
        and value_at(theirs, path) is None
    }


def merged(theirs: Any, ours: Any) -> Any:
    if not isinstance(theirs, Mapping) or not isinstance(ours, Mapping):
        return ours
    return {**theirs, **{key: merged(theirs.get(key), value) for key, value in ours.items()}}


def without(values: Any, paths: set[str], at: str = "") -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: without(value, paths, f"{at}{key}.") for key, value in values.items() if f"{at}{key}" not in paths}


def wrong_paths(algorithm: str, values: Mapping[str, Any]) -> set[str]:
    """What NeMo-RL's types do not take of a whole configuration, or miss in it."""
    found = set()
    sections: list[tuple[Any, Any, str]] = [(type_of(algorithm), values, "")]
    if algorithm in ("grpo", "distillation") and value_at(values, "policy.generation.backend") == "vllm":
        sections.append((type_of_vllm(), values["policy"]["generation"], "policy.generation."))
    for annotation, section, at in sections:
        try:
            TypeAdapter(annotation).validate_python(section)
        except ValidationError as error:
            found |= {f"{at}{path_in(section, each['loc'], each['type'])}" for each in error.errors()}
    return found - SET_BY_ITS_PROGRAM.keys()


def path_in(values: Any, location: tuple[int | str, ...], kind: str) -> str:
    """Where something is wrong, by keys alone: pydantic names the types of a union, too."""
    path = []
    for part in location:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif kind != "missing" or part != location[-1]:
            continue
        path.append(str(part))
    return ".".join(path)


def nulls_and_wrong(exemplar: Path) -> tuple[set[str], set[str]]:
    """What NeMo-RL's types do not take: nulls, and of the rest what is wrong without these."""
    ours = load_config(exemplar)
    algorithm = ours["algorithm"]
    theirs = exemplar_of(algorithm)
    found = wrong_paths(algorithm, merged(theirs, ours))
    nulls = {path for path in found if value_at(merged(theirs, ours), path) is None}
    return nulls, wrong_paths(algorithm, merged(theirs, without(ours, nulls)))


def is_in(path: str, table: Mapping[str, str]) -> bool:
    return any(f"{path}.".startswith(f"{each}.") for each in table)


@pytest.mark.parametrize("algorithm", THEIRS)
def test_their_own_exemplars_are_of_their_types(algorithm: str) -> None:
    assert wrong_paths(algorithm, exemplar_of(algorithm)) == set()


@pytest.mark.parametrize("exemplar", EXEMPLARS, ids=lambda path: path.stem)
def test_keys_stand_where_nemo_rl_has_them_and_have_values_of_its_types(exemplar: Path) -> None:
    nulls, wrong = nulls_and_wrong(exemplar)
    assert {path for path in ours_alone(exemplar) if not is_in(path, OURS)} == set()
    assert nulls - NULLS.keys() == set()
    assert wrong - OTHER_VALUES.keys() == set()


def test_the_tables_have_nothing_that_no_exemplar_needs() -> None:
    alone = set().union(*map(ours_alone, EXEMPLARS))
    assert {each for each in OURS if not any(is_in(path, {each: ""}) for path in alone)} == set()
    nulls, wrong = (set().union(*each) for each in zip(*map(nulls_and_wrong, EXEMPLARS), strict=True))
    assert (nulls, wrong) == (NULLS.keys(), OTHER_VALUES.keys())


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("policy.train_global_batch_sise", 8, "alone"),
        ("policy.megatron_cfg.optimizer.learning_rate", 0.1, "alone"),
        ("policy.megatron_cfg.lr", 0.1, "alone"),
        ("policy.generation.vllm_cfg.enforce_eagr", True, "alone"),
        ("policy.generation.gpu_memory_utilization", 0.5, "alone"),
        ("policy.train_global_batch_size", "many", "wrong"),
        ("policy.megatron_cfg.optimizer.lr", "fast", "wrong"),
        ("policy.megatron_cfg.empty_unused_memory_level", "high", "wrong"),
        ("policy.generation.vllm_cfg.gpu_memory_utilization", "most", "wrong"),
        ("grpo.num_prompts_per_step", [1], "wrong"),
        ("data.shuffle", "sometimes", "wrong"),
        ("cluster.num_nodes", None, "null"),
        ("checkpointing.save_period", None, "null"),
    ],
)
def test_a_planted_fault_is_found(path: str, value: object, found: str, tmp_path: Path) -> None:
    planted: Any = value
    for key in reversed(path.split(".")):
        planted = {key: planted}
    file = tmp_path / "planted.yaml"
    file.write_text(yaml.safe_dump({"defaults": str(CONFIGS / "grpo_math_1B_vllm.yaml"), **planted}))
    nulls, wrong = nulls_and_wrong(file)
    seen = {"alone": ours_alone(file), "wrong": wrong, "null": nulls}
    assert path in seen[found]
    assert not any(is_in(path, table) for table in (OURS, NULLS, OTHER_VALUES))
