"""What is wrong with the data of a configuration, found by preparing them as a run does.

Only what is on this machine is looked at, and no more than `LIMIT_BYTES` of it: a check takes seconds.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.loader import resolve_data_path, resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer
from nemo_rl_offload.data.prompts import prompt_data, prompt_sets
from nemo_rl_offload.data.records import files_of
from nemo_rl_offload.data.samples import sample_sets
from nemo_rl_offload.errors import ConfigError, DataError
from nemo_rl_offload.units import MIB

LIMIT_BYTES = 32 * MIB
"""Of all files together; larger data are left to the run."""


def data_problems(config: MasterConfig, *, trains: bool = True) -> Iterator[str]:
    """What a run would end with; nothing where a model, tokenizer or data set is not here, or is too large.

    Without ``trains`` it is an evaluation's, which takes no problem to train on.
    """
    data, policy = config["data"], config["policy"]
    sections: dict[str, Any] = {"data.train": data["train"], "data.validation": data["validation"]}
    for name, section in list(sections.items()):
        sections |= {f"{name}.further.{number}": each for number, each in enumerate(section["further"])}
    named = {name: section for name, section in sections.items() if section["path"] is not None}
    if not named:
        return
    try:
        resolve_model_path(policy["model_name"])
        resolve_tokenizer_path(policy["tokenizer"]["name"])
        paths = {name: resolve_data_path(str(section["path"])) for name, section in named.items()}
        for text in filter(None, (data["prompt_file"], data["system_prompt_file"])):
            resolve_data_path(text)
    except ConfigError:
        return
    files: list[Path] = []
    for name, path in paths.items():
        try:
            files += files_of(path, named[name]["split"])
        except DataError as error:
            yield f"{name}.path: {error}"
            return
    if sum(file.stat().st_size for file in files) > LIMIT_BYTES:
        return
    seed = 0  # of the order, which is nothing here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run says them
            tokenizer, end_ids = load_policy_tokenizer(policy, data["prompt_template"])
            if ALGORITHMS[config["algorithm"]].generates:
                training, _ = prompt_sets(prompt_data(config), config["env"]["reasoning_gym"], tokenizer, seed)
                if trains:
                    training.check()
            else:
                sample_sets(config, tokenizer, end_ids, seed)
    except (ConfigError, DataError) as error:
        yield str(error)
