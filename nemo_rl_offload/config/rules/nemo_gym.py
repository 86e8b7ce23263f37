"""Rules about NeMo-Gym, whose agents lead episodes: it asks for responses one by one, as messages of a chat."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.rules.rule import Get, Rule, algorithm_spec
from nemo_rl_offload.config.rules.vllm import BACKEND, CFG
from nemo_rl_offload.errors import nearest

GYM = "env.nemo_gym"
PYTHON = Path(".nemo-gym/bin/python")
"""Of nemo-gym's environment, where the configuration names none."""
VERSION = "0.4.0"
"""Of nemo-gym, that was tested."""
INSTALL = (
    f"`uv venv --python 3.12 {PYTHON.parent.parent}` and `uv pip install --no-config --python {PYTHON} "
    f"nemo-gym=={VERSION}` make one"
)
OF_GYM = (
    *("config_paths", "skip_venv_if_present", "uv_venv_dir", "uv_cache_dir", "python_version", "pip_install_verbose"),
    *("port_range_low", "port_range_high", "default_host", "disallowed_ports", "head_server_deps", "hf_token"),
    *("use_absolute_ip", "dry_run", "nemo_gym_log_dir", "uv_pip_set_python"),
)
"""NeMo-Gym's own keys that are no servers."""
_CHAT = f"{CFG}.http_server_serving_chat_kwargs"
_OF_TEXTS = (
    *("data.prompt_template", "data.prompt_file", "data.system_prompt_file"),
    *("data.train.input_key", "data.train.output_key", "data.validation.input_key", "data.validation.output_key"),
)


def leads_episodes(get: Get) -> bool:
    """Whether NeMo-Gym leads a run's episodes."""
    return algorithm_spec(get).generates and ENVIRONMENTS[get("data.env_name")].leads_episodes


def gym_python(python: str | None) -> Path:
    """The interpreter that has nemo-gym: `env.nemo_gym.python`, or the place where it usually is."""
    return Path(os.path.abspath(python or PYTHON))  # not what it links to, which knows another environment


def fault_of_python(python: Path) -> str | None:
    """What keeps an interpreter from being run; None for nothing."""
    if not python.exists():
        return f"there is no {python}; nemo-gym needs an environment of its own. {INSTALL}."
    if not python.is_file() or not os.access(python, os.X_OK):
        return f"{python} is no program. Give the python of an environment that has nemo-gym, such as {PYTHON}."
    return None


def _engines(get: Get) -> Iterator[str]:
    if not leads_episodes(get):
        return
    path = f"data.env_name: {get('data.env_name')}"
    if not algorithm_spec(get).takes_led_episodes:
        able = " and ".join(name for name, spec in ALGORITHMS.items() if spec.takes_led_episodes)
        others = ", ".join(name for name, spec in ENVIRONMENTS.items() if not spec.leads_episodes)
        yield (
            f"{path} asks for NeMo-Gym with {get('algorithm')}, not supported here: it leads episodes of {able}. Take "
            f"one of {others}."
        )
    elif get(BACKEND) != "vllm":
        yield (
            f"{BACKEND}: {get(BACKEND)} asks for NeMo-Gym with Megatron-Core's generation, not supported here: "
            "an agent asks for responses one by one. Set it to vllm."
        )
    elif not get(f"{CFG}.async_engine"):
        yield f"{CFG}.async_engine: {path} asks for responses one by one. Set it to true."


def _servers(get: Get) -> Iterator[str]:
    if not leads_episodes(get):
        return
    path, example = f"{GYM}.config.config_paths", "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
    paths = get(f"{GYM}.config").get("config_paths")
    if not isinstance(paths, list) or not paths or not all(isinstance(each, str) for each in paths):
        given = "missing value" if paths is None else f"{json.dumps(paths, default=str)} is no list of files"
        yield f"{path}: {given}: they say which servers NeMo-Gym starts. Give a list: [{example}, ...]."


def _conversations(get: Get) -> Iterator[str]:
    for path in _OF_TEXTS if leads_episodes(get) else ():
        if get(path) is not None:
            yield f"{path}: records of NeMo-Gym are whole conversations. Set it to null."


def _tools(get: Get) -> Iterator[str]:
    if leads_episodes(get) and get(f"{_CHAT}.enable_auto_tools") and get(f"{_CHAT}.tool_parser") is None:
        yield f"{_CHAT}.tool_parser: missing value: enable_auto_tools is true. Give vLLM's name of one, such as hermes."


def _python_is_here(get: Get) -> Iterator[str]:
    if leads_episodes(get) and (fault := fault_of_python(gym_python(get(f"{GYM}.python")))) is not None:
        yield f"{GYM}.python: {fault}"


def _config_paths_are_here(get: Get) -> Iterator[str]:
    paths, python = get(f"{GYM}.config").get("config_paths"), gym_python(get(f"{GYM}.python"))
    if not leads_episodes(get) or not isinstance(paths, list) or fault_of_python(python) is not None:
        return
    packages = (python.parent.parent / "lib").glob("python*/site-packages")
    installed = [place for place in packages if (place / "nemo_gym/__init__.py").is_file()]
    if not installed:  # one that is installed from a clone, in which NeMo-Gym looks itself
        return
    for number, path in enumerate(paths):
        if isinstance(path, str) and not any((place / path).is_file() for place in (Path.cwd(), *installed)):
            yield (
                f"{GYM}.config.config_paths.{number}: {path} is neither in {Path.cwd()} nor where nemo-gym is, "
                f"{', '.join(map(str, installed))}. Give a file that is there."
            )


def _plugins_are_here(get: Get) -> Iterator[str]:
    for key in ("tool_parser_plugin", "reasoning_parser_plugin") if leads_episodes(get) else ():
        path = get(f"{CFG}.{key}")
        if path is not None and not Path(path).is_file():
            yield f"{CFG}.{key}: there is no file {path}. Give one, or null."


def _texts_of_faults(get: Get) -> Iterator[str]:
    for key in ("invalid_tool_call_patterns", "thinking_tags") if leads_episodes(get) else ():
        if not all(get(f"{GYM}.{key}")):
            yield f"{GYM}.{key}: an empty text is in every turn. Leave it out."


def _misspelt(get: Get) -> Iterator[str]:
    """A key of the section's own goes to NeMo-Gym where it is written otherwise."""
    own = [key for key in get(GYM) if key != "config"]
    for key, value in get(f"{GYM}.config").items() if leads_episodes(get) else ():
        if key not in OF_GYM and not isinstance(value, Mapping) and (hint := nearest(key, [*own, *OF_GYM])):
            yield f"{GYM}.config.{key}: NeMo-Gym is told it as it is, and there is another key much like it.{hint}"


def _no_calls(get: Get) -> Iterator[str]:
    if leads_episodes(get) and get(f"{_CHAT}.tool_parser") and not get(f"{_CHAT}.enable_auto_tools"):
        yield f"{_CHAT}.tool_parser: has no effect while enable_auto_tools is false. Set that to true."


GYM_RULES: tuple[Rule, ...] = (_engines, _servers, _conversations, _tools, _texts_of_faults)
GYM_MACHINE_RULES: tuple[Rule, ...] = (_python_is_here, _config_paths_are_here, _plugins_are_here)
GYM_WARNINGS: tuple[Rule, ...] = (_no_calls, _misspelt)
