"""The section `data` in NeMo-RL's language: data sets by name, and keys that both data sets have.

A name becomes the path of the data set on the hub (`specs/data_sets.py`), a local file's key its `path`. What NeMo-RL
says for each data set and there is one of here, as the prompt's file, has to be the same for both.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.full_schema import section_at
from nemo_rl_offload.config.nemo_rl.translation import Translation, refuse, shown
from nemo_rl_offload.config.types import defaults_of, item_type, keys_of
from nemo_rl_offload.errors import nearest
from nemo_rl_offload.specs.data_sets import DATA_SETS, OF_FILES, DataSet

SPLITS = ("train", "validation")
_OF_BOTH = ("prompt_file", "system_prompt_file", "env_name", "processor")
_PROCESSORS: Mapping[str, tuple[str, ...]] = {
    "responses": ("math_hf_data_processor", "math_data_processor", "nemo_gym_data_processor", "default"),
    "conversations": ("sft_processor", "default"),
    "pairs": ("default",),
}
"""By what an algorithm learns from."""
_NOT_HERE = {"multichoice_qa": "multiple choice", "code": "execution of code",
             "reward_model": "reward models"}  # fmt: skip


def translate_lists(values: dict[str, Any], problems: dict[str, str]) -> dict[str, Any]:
    """The first of several data sets as the section; `further_data_sets` are the others."""
    data = values.get("data")
    if not isinstance(data, Mapping):
        return values
    changed = dict(data)
    for split in SPLITS:
        path, section = f"data.{split}", data.get(split)
        if isinstance(section, Mapping) and _are_sections(section.get("further")):
            changed[split] = {**section, "further": []}
        if not isinstance(section, list):
            continue
        if not section or not _are_sections(section):
            problems[path] = f"{shown(section)} is not allowed. Allowed: a section of keys, or a list of such sections."
        given = section[0] if section and isinstance(section[0], Mapping) else {}
        changed[split] = defaults_of(section_at(["data", split])) | dict(given)
    return {**values, "data": changed}


def _are_sections(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(each, Mapping) for each in given)


def further_data_sets(values: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Split, path and whole configuration of each data set behind the first, as if it were the first.

    They are those of a list in the section's place, or of its key `further`. One has what `data.default` says, else the
    defaults; and nothing from the first, as in NeMo-RL.
    """
    if not isinstance(data := values.get("data"), Mapping):
        return
    for split in SPLITS:
        section, place = data.get(split), f"data.{split}"
        others: Any = section[1:] if isinstance(section, list) else None
        if in_section := isinstance(section, Mapping):
            place, others = f"{place}.further", section.get("further")
        if not _are_sections(others):
            continue
        for number, each in enumerate(others, start=0 if in_section else 1):
            yield split, f"{place}.{number}", {**values, "data": {**data, **dict.fromkeys(SPLITS), split: [each]}}


def add_data_set(translation: Translation, split: str, place: str, inner: Translation) -> None:
    """Put a further data set, of a configuration that was translated by itself, behind those that there are.

    ``place`` is the path where it is written.
    """
    own = inner.get(f"data.{split}")
    allowed = keys_of(item_type(section_at(["data", split, "further"]), list))
    for path, text in inner.problems.items():
        if path.startswith(f"data.{split}."):
            translation.problems[f"{place}{path.removeprefix(f'data.{split}')}"] = text
    for key in ("prompt_file", "system_prompt_file", "env_name"):
        mine, others = inner.get(f"data.{key}"), translation.get(f"data.{key}")
        if mine != others:
            reason = f"the first has {shown(others)}"
            refuse(translation, f"{place}.{key}", mine, "another value for each data set", reason, "Give all the same.")
    if not isinstance(own, Mapping):
        return
    defaults = defaults_of(section_at(["data", split]))
    for key in own.keys() - allowed.keys():
        if own[key] != defaults.get(key):
            translation.problems[f"{place}.{key}"] = f"unknown key in a list. Allowed: {', '.join(allowed)}."
    if own.get("path") is None and not any(path.startswith(f"{place}.") for path in translation.problems):
        translation.problems[f"{place}.path"] = f"missing value. Give one: {place}.path=..."
    further = [*(translation.get(f"data.{split}.further") or []), {key: own.get(key) for key in allowed}]
    translation.set(f"data.{split}.further", [each for each in further if each["path"] is not None])


def translate_data(translation: Translation, rank: Callable[[str], int]) -> None:
    """Change the section `data` of a configuration in place; `rank` says which of two keys is to count."""
    honoured = translation.honoured
    files: dict[str, list[Any]] = {"prompt_file": [], "system_prompt_file": []}
    _bounds(translation)
    _all_records(translation)
    _generation_prompt(translation)
    for split in SPLITS:
        default = {
            key.removeprefix("data.default."): value
            for key, value in honoured.items()
            if key.startswith("data.default.")
        }
        own = {
            key.removeprefix(f"data.{split}."): value
            for key, value in honoured.items()
            if key.startswith(f"data.{split}.")
        }
        defaults = defaults_of(section_at(["data", split]))
        given = {
            key
            for key, value in defaults.items()
            if translation.get(f"data.{split}.{key}") != value
            or _counts(translation, f"data.{split}.{key}", f"data.default.{key}", rank)
        }
        is_there = bool(own.keys() & {"dataset_name", "data_path"}) or translation.get(f"data.{split}.path") is not None
        sources = {key: f"data.{split if key in own else 'default'}.{key}" for key in _OF_BOTH}
        nearer = {key for key in _OF_BOTH if _is_nearer(translation, f"data.{key}", sources[key], rank)}
        for key, found in files.items():
            if is_there and key not in nearer:
                found.append(own.get(key, default.get(key)))
        if split == SPLITS[0] and own.get("repeat", 1) not in (1, None):
            reason = "a run passes over its records max_num_epochs times"
            refuse(translation, f"data.{split}.repeat", own["repeat"], "repeated records", reason, "Set it to 1.")
        for key in _OF_BOTH:
            if key in nearer and (key in default or key in own):
                translation.without_effect[sources[key]] = f"data.{key} says it"
            elif key in own or (key in default and (is_there or split == SPLITS[0])):
                _for_both(translation, sources[key], key, own.get(key, default.get(key)), rank)
        if is_there:
            of_default = default.keys() - own.keys()
            if "path" in given and _names_data_otherwise(translation, split, default | own, of_default, rank):
                given -= {"path"}
            _source(translation, split, default | own, of_default, given)
    for key, found in files.items():
        if len({str(value) for value in found}) > 1 and f"data.{key}" not in translation.problems:
            reason = f"training has {shown(found[0])} and validation {shown(found[-1])}"
            refuse(translation, f"data.{key}", None, "another value for each data set", reason, "Give both the same.")


def _bounds(translation: Translation) -> None:
    if translation.get("data.max_input_seq_length") is None:
        translation.set("data.max_input_seq_length", translation.get("policy.max_total_sequence_length"))


def _all_records(translation: Translation) -> None:
    for split in SPLITS:
        path = f"data.{split}.max_samples"
        most = translation.get(path)
        if type(most) is int and most <= 0:
            translation.set(path, None, path)


def _generation_prompt(translation: Translation) -> None:
    path = "data.add_generation_prompt"
    template = translation.get("policy.tokenizer.chat_template")
    opens = not (isinstance(template, str) and "{" in template and "add_generation_prompt" not in template)
    if translation.honoured.get(path) is False and opens:
        reason = "what the chat template opens an assistant's turn with is given, and never learned"
        refuse(translation, path, False, "a learned opening of turns", reason, "Set it to true.")


def _counts(translation: Translation, path: str, source: str, rank: Callable[[str], int]) -> bool:
    """Whether a key of this project's was written, and as near as NeMo-RL's that means the same, or nearer."""
    return path in translation.given and rank(path) >= rank(source)


def _is_nearer(translation: Translation, path: str, source: str, rank: Callable[[str], int]) -> bool:
    return path in translation.given and rank(path) > rank(source)


def _for_both(translation: Translation, source: str, key: str, value: Any, rank: Callable[[str], int]) -> None:
    if key == "processor":
        _processor(translation, source, value)
        return
    path = f"data.{key}"
    if key == "env_name":
        generates = ALGORITHMS[translation.get("algorithm")].generates
        if not generates:
            translation.without_effect[source] = "no environment scores given answers"
            return
        if value not in ENVIRONMENTS:
            feature = _NOT_HERE.get(value, "an environment of this name")
            there = ", ".join(ENVIRONMENTS)
            how = f"Set it to one of them.{nearest(str(value), ENVIRONMENTS)}"
            refuse(translation, source, value, feature, f"environments are {there}", how)
            of_files = (name for name, spec in ENVIRONMENTS.items() if spec.problems == "file")
            translation.set("data.env_name", next(of_files))  # as all that NeMo-RL has
            return
    before = translation.became.get(path)
    if before is not None and translation.get(path) != value:
        reason = f"{before} is {shown(translation.get(path))}"
        refuse(translation, source, value, "another value for each data set", reason, "Give both the same.")
        return
    is_said_twice = path in translation.given and rank(path) == rank(source) > 0
    if before is None and is_said_twice and translation.get(path) != value:
        translation.problems[path] = f"is {shown(translation.get(path))}, and {source} {shown(value)}. Leave one out."
    translation.set(path, value, source)


def _processor(translation: Translation, source: str, value: Any) -> None:
    learns_from = ALGORITHMS[translation.get("algorithm")].learns_from
    if value in _PROCESSORS[learns_from]:
        return
    feature = "another processor of records"
    if value == "kd_data_processor":
        feature = "cross-tokenizer distillation"
    allowed = " or ".join(_PROCESSORS[learns_from])
    reason = "records become samples as the algorithm needs them"
    refuse(translation, source, value, feature, reason, f"Set it to {allowed}.")


def _names_data_otherwise(
    translation: Translation, split: str, keys: Mapping[str, Any], of_default: Any, rank: Callable[[str], int]
) -> bool:
    """Whether a name of NeMo-RL's counts in place of `path`: one that is given nearer, as an override beside a file."""
    path = f"data.{split}.path"
    for key in ("dataset_name", "data_path"):
        source = f"data.{'default' if key in of_default else split}.{key}"
        if keys.get(key) is not None and rank(source) >= rank(path):
            if rank(source) == rank(path) > 0 and keys[key] not in OF_FILES:
                translation.problems[path] = f"names data, as {source} does. Leave one of them out."
            return True
    return False


def _source(translation: Translation, split: str, keys: Mapping[str, Any], of_default: Any, given: set[str]) -> None:
    """Where the records come from, and what their columns are called."""
    section = f"data.{split}"

    def place(key: str) -> str:
        return f"data.default.{key}" if key in of_default else f"{section}.{key}"

    name, file = keys.get("dataset_name"), keys.get("data_path")
    known: DataSet | None = DATA_SETS.get(name) if isinstance(name, str) else None
    if "path" in given:
        if name is not None:
            translation.without_effect[place("dataset_name")] = f"{section}.path names the data"
    elif known is not None and file is None:
        translation.set(f"{section}.path", known.path, place("dataset_name"))
        if "split" not in given and "default.split" not in keys:
            translation.set(f"{section}.split", keys.get("split", known.split), place("dataset_name"))
        if split == "train" and "split_validation_size" not in keys and "split_validation_size" not in given:
            translation.set(f"{section}.split_validation_size", known.validation_size, place("dataset_name"))
    elif name is None or str(name) in OF_FILES:
        if file is not None:
            translation.set(f"{section}.path", file, place("data_path"))
        if "split" in keys and "split" not in given:
            translation.set(f"{section}.split", keys["split"], place("split"))
        if name == "ResponseDataset" or keys.keys() & {"input_key", "output_key"}:
            for key, usual in (("input_key", "input"), ("output_key", "output")):
                if key not in given:
                    translation.set(f"{section}.{key}", keys.get(key, usual), place(key))
    else:
        feature = _feature_of(name)
        there = ", ".join(DATA_SETS)
        refuse(
            translation,
            place("dataset_name"),
            name,
            feature,
            f"there are {there}; and local files as {', '.join(OF_FILES)}",
            f"Give one of them.{nearest(str(name), [*DATA_SETS, *OF_FILES])}",
        )
    for key in ("input_key", "output_key", "split_validation_size", "seed", "repeat", "max_samples"):
        if key in of_default and key not in given and f"{section}.{key}" in _paths(section):
            translation.set(f"{section}.{key}", keys[key], place(key))


def _paths(section: str) -> set[str]:
    return {f"{section}.{key}" for key in keys_of(section_at(section.split(".")))}


def _feature_of(name: str) -> str:
    if name == "arrow_text":
        return "raw text"
    if "://" in name:
        return "data behind an address"
    return "a data set class of one's own" if "." in name else "a data set of this name"
