"""Rules about the machine that runs a configuration: what must be here, and which environment its workers get.

A model, a tokenizer, data, a teacher, packages and the user's function are looked up for a run; a check elsewhere only
warns. A user's module may do anything, so its source is read, not imported. The limit: what a source does not say
plainly, such as names that are made while it runs, is left to the run.
"""

import ast
import fnmatch
import importlib.machinery
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Literal

from nemo_rl_offload.config.loader import (
    EMPTY_PATH,
    is_folder_here,
    resolve_data_path,
    resolve_model_path,
    resolve_tokenizer_path,
)
from nemo_rl_offload.config.rules.megatron import fusions_without_effect, transformer_engine_settings
from nemo_rl_offload.config.rules.parallel import worker_counts
from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    algorithm_spec,
    flex_backend,
    have_transformer_engine,
    megatron,
    model_shape,
    read_shape,
)
from nemo_rl_offload.config.rules.speculative import SPECULATIVE, drafts
from nemo_rl_offload.config.rules.tasks import (
    FUNCTION,
    SPLITS,
    data_sets,
    function_path,
    is_scored_by_function,
    takes_problems,
)
from nemo_rl_offload.config.rules.turns import template_is_here
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs import sandbox
from nemo_rl_offload.specs.catalogue import read_config_file
from nemo_rl_offload.specs.dispatchers import FLEX_LIBRARIES
from nemo_rl_offload.specs.generation import (
    ENV,
    ENV_OF_CPU,
    ENV_OF_CUDA,
    ENV_OF_DEEP_GEMM,
    ENV_OF_FIRST_RUNNER,
    ENV_OF_SEVERAL_DEVICES,
)
from nemo_rl_offload.specs.reward_functions import CALL, OF_TRL
from nemo_rl_offload.specs.weight_files import weight_files

LOCAL_PATHS = (
    "policy.model_name",
    "policy.tokenizer.name",
    "teacher.model_name",
    "data.train.path",
    "data.validation.path",
    "eval.save_path",
    "checkpointing.checkpoint_dir",
)
LOOPBACK = "lo"
SET_BY_GROUP = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONUNBUFFERED"),
)
"""Environment variables that this project sets for each worker itself."""


def _is_not_empty(path: str, get: Get) -> Iterator[str]:
    name = get(path)
    if name is not None and not name.strip():
        yield f"{path}: {EMPTY_PATH}"


def model_can_be_read(get: Get) -> Iterator[str]:
    """A rule: where the folder of the model or the teacher is here, it has a config.json that can be read."""
    teacher = get("teacher.model_name") if algorithm_spec(get).needs_teacher else None
    for path, name in (("policy.model_name", get("policy.model_name")), ("teacher.model_name", teacher)):
        if name is None or not name.strip():  # which other rules report
            continue
        try:
            if is_folder_here(name) or _is_folder(name):  # else `_model_is_here` says so
                read_config_file(resolve_model_path(name) / "config.json")
        except ConfigError as error:
            yield f"{path}: {error}"


def _is_folder(name: str) -> bool:
    try:
        resolve_model_path(name)
    except ConfigError:
        return False
    return True


def split_of_a_file(get: Get) -> Iterator[str]:
    """A warning about a split of what has none, where it is here."""
    for name, section in data_sets(get):
        path, split = section["path"], section["split"]
        with suppress(ConfigError):
            if split is not None and resolve_data_path(path).is_file():
                yield f"{name}.split: {split} has no effect, since {path} is one file. Set it to null."


def _model_is_here(get: Get) -> Iterator[str]:
    yield from _model_with_weights("policy.model_name", get("policy.model_name"))


def _model_with_weights(path: str, name: str) -> Iterator[str]:
    """Of the weights, what the heads of their files say; the weights themselves are not read."""
    try:
        folder = resolve_model_path(name)
    except ConfigError as error:
        yield f"{path}: {error}"
        return
    files = {file.name for file in folder.iterdir()}
    if files & {"model.safetensors.index.json", "adapter_config.json"} or fnmatch.filter(files, "model*.safetensors"):
        try:
            content = read_config_file(folder / "config.json")
            weight_files(folder, is_quantized=bool(content.get("quantization_config")))
        except ConfigError as error:
            yield f"{path}: {error}"
        return
    others = sorted(fnmatch.filter(files, "*.bin"))
    of_pickle = f"{', '.join(others)} is not read: load the model, and save it anew with save_pretrained."
    yield (
        f"{path}: {folder} has a config.json and no weights: neither model.safetensors nor "
        f"model.safetensors.index.json. {of_pickle if others else 'Is the download complete?'}"
    )


def _tokenizer_is_here(get: Get) -> Iterator[str]:
    """Of one in the model's folder, `_model_is_here` says that there is no such folder."""
    name = get("policy.tokenizer.name")
    if name == get("policy.model_name") and not _is_folder(name):
        return
    try:
        resolve_tokenizer_path(name)
    except ConfigError as error:
        yield f"policy.tokenizer.name: {error}"


def model_is_unknown(get: Get) -> Iterator[str]:
    """A warning where rules that need the model's config.json were not checked."""
    try:
        read_shape(get("policy.model_name"))
    except ConfigError:
        yield "policy.model_name: rules about the model's layers were not checked, without its config.json."


def env_vars(get: Get) -> Iterator[str]:
    """A rule: no environment variable that this project sets itself."""
    for name in megatron(get, "env_vars") or {}:
        if name in SET_BY_GROUP:
            yield f"{MEGATRON}.env_vars.{name}: is set for each worker by this project. Remove it."
    path, set_here = (
        "policy.generation.vllm_cfg.env_vars",
        ENV_OF_DEEP_GEMM | ENV | ENV_OF_SEVERAL_DEVICES | ENV_OF_CPU | ENV_OF_CUDA | ENV_OF_FIRST_RUNNER,
    )
    for name, value in (get(path) or {}).items():
        if name in SET_BY_GROUP or value != set_here.get(name, value):
            yield f"{path}.{name}: is set for each engine by this project. Remove it."


def _transformer_engine_is_here(get: Get) -> Iterator[str]:
    impl = megatron(get, "transformer_impl")
    if impl == "torch" or have_transformer_engine():
        return
    if impl == "transformer_engine":
        yield f"{MEGATRON}.transformer_impl: transformer_engine is not installed here. Install it, or set torch."
    for key in transformer_engine_settings(get):
        if key not in fusions_without_effect(get):
            yield f"{MEGATRON}.{key}: {megatron(get, key)} needs Transformer Engine, which is not installed here."


def _dispatcher_is_here(get: Get) -> Iterator[str]:
    if megatron(get, "moe_token_dispatcher_type") != "flex" or not model_shape(get).has_experts:
        return
    backend = flex_backend(get)
    package, how = FLEX_LIBRARIES[backend]
    if find_spec(package) is None:
        yield (
            f"{MEGATRON}.moe_token_dispatcher_type: flex with {backend} needs {package}, which is not installed here. "
            f"{how}, or set alltoall."
        )


def _tracker_is_here(name: str, how: str, get: Get) -> Iterator[str]:
    if get(f"logger.{name}_enabled") and find_spec(name) is None:
        yield f"logger.{name}_enabled: the package {name} is not installed. Install it (`{how}`), or set this to false."


def _teacher_is_here(get: Get) -> Iterator[str]:
    name = get("teacher.model_name")
    if algorithm_spec(get).needs_teacher and name is not None:
        yield from _model_with_weights("teacher.model_name", name)


def _draft_model_is_here(get: Get) -> Iterator[str]:
    if (section := drafts(get)) is not None and isinstance(name := section.get("model"), str):
        yield from _model_with_weights(f"{SPECULATIVE}.model", name)


def _data_is_here(get: Get) -> Iterator[str]:
    files = () if takes_problems(get) else tuple(f"{split}.path" for split in SPLITS)
    prompt_files = ("data.prompt_file", "data.system_prompt_file")
    paths = {key: get(key) for key in (*files, *prompt_files)}
    for split in SPLITS if files else ():
        paths |= {f"{split}.further.{number}.path": each["path"] for number, each in enumerate(get(f"{split}.further"))}
    for key, path in paths.items():
        if path is not None:
            try:
                resolve_data_path(path)
            except ConfigError as error:
                how = "local path, or null." if key in prompt_files else "local path."
                yield f"{key}: {str(error).replace('local path.', how)}"


def _programs_can_be_isolated(get: Get) -> Iterator[str]:
    section = "env.code_tests"
    is_run = algorithm_spec(get).generates and f"env.{get('data.env_name')}" == section
    if is_run and get(f"{section}.sandbox") == "required" and (why := sandbox.missing()) is not None:
        yield (
            f"{section}.sandbox: what a model writes would run with your rights here: {why}. Take a machine whose "
            "kernel has Landlock and seccomp, or set it to off where all of this machine may be lost."
        )


def _function_is_here(get: Get) -> Iterator[str]:
    module, _ = _function(get)
    if module is not None and isinstance(found := find_module(module), str):
        yield f"{FUNCTION}.path: {found}"


def function_fits(get: Get) -> Iterator[str]:
    """A rule: a reward function whose module is here is there, and can be called."""
    module, name = _function(get)
    found = None if module is None else find_module(module)
    if found is None or isinstance(found, str) or not found.origin or not found.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(found.origin).read_bytes())
    except SyntaxError as error:
        yield f"{FUNCTION}.path: {found.origin}:{error.lineno}: {error.msg}. Mend it."
        return
    names = _names_of_module(tree)
    if names is not None and name not in names:
        yield f"{FUNCTION}.path: {module} ({found.origin}) has no function '{name}'.{nearest(name, names)}"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and not node.decorator_list:
            yield from _params_of_function(node, get)
    if (what := _no_function(tree, name)) is not None:
        yield (
            f"{FUNCTION}.path: {module}:{name} is {what}, and not a function that returns a reward. Write it with def."
        )


def _function(get: Get) -> tuple[str | None, str]:
    """The module of the reward function and its name there; None where none scores, or its path is none."""
    path = get(f"{FUNCTION}.path")
    if not is_scored_by_function(get) or path is None or any(function_path(get)):
        return None, ""
    module, _, name = path.partition(":")
    return module, name


def _no_function(tree: ast.Module, name: str) -> str | None:
    """What a name of a module is that cannot be called for a reward; None where it can, or that is not plain."""
    found: str | None = None
    for node in tree.body:
        match node:
            case ast.FunctionDef() if node.name == name:
                gives = any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in _own_nodes(node))
                found = "a generator" if gives and not node.decorator_list else None
            case ast.AsyncFunctionDef() if node.name == name:
                found = None if node.decorator_list else "a coroutine (async def)"
            case ast.ClassDef() if node.name == name:
                found = None if node.decorator_list or node.keywords else "a class"
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                is_plain = isinstance(value, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set | ast.JoinedStr)
                found = f"the value {ast.unparse(value)[:40]}" if is_plain else None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case ast.AnnAssign() | ast.Assign() | ast.Import() | ast.ImportFrom() | ast.Expr():
                continue
            case _:  # which may change anything
                return None
    return found


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What a function has in itself, without the functions in it."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            left += ast.iter_child_nodes(node)


def _params_of_function(function: ast.FunctionDef, get: Get) -> Iterator[str]:
    """What `env.function.params` has that the function does not take, and lacks that it needs."""
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if (len(positional) < 2 and arguments.vararg is None) or OF_TRL in positional:
        yield (
            f"{FUNCTION}.path: {function.name}({ast.unparse(arguments)}) cannot be called as function(messages, entry, "
            f"**params). Give it these two parameters first. {CALL}."
        )
        return
    needed = positional[2 : len(positional) - len(arguments.defaults)]
    allowed = positional[2:] + [argument.arg for argument in arguments.kwonlyargs]
    needed += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    given, path = get(f"{FUNCTION}.params"), f"{FUNCTION}.params"
    for name in given:
        if name not in allowed and arguments.kwarg is None:
            takes = f"It takes: {', '.join(allowed)}." if allowed else "It takes none."
            yield (
                f"{path}.{name}: not a parameter of {function.name}.{nearest(name, allowed)} {takes} Remove it: "
                f"~{path}.{name}. In a file that inherits it: params: {{_override_: true}}."
            )
    for name in needed:
        if name not in given:
            yield (
                f"{path}.{name}: missing value: {function.name} has no default for it. Give one: +{path}.{name}=..., "
                f"or make it no parameter: a call is {function.name}(messages, entry, **params), and entry is the "
                "problem's record, with its answer."
            )


def find_module(module: str) -> importlib.machinery.ModuleSpec | str | None:
    """Where a module is, without an import of its packages; None where that is not plain, else why there is none."""
    if module in sys.modules:
        return None
    folders: Sequence[str] = [*sys.path, os.getcwd()]
    spec: importlib.machinery.ModuleSpec | None = None
    for depth, part in enumerate(module.split(".")):
        package = spec
        spec = find_spec(part) if depth == 0 and part not in sys.modules else None  # editable installs have finders
        spec = spec or importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None and package is not None and _makes_modules(package):
            return None
        if spec is None:
            there = {entry.stem for folder in folders if Path(folder).is_dir() for entry in Path(folder).iterdir()}
            there -= sys.stdlib_module_names  # of hundreds, one is always alike
            return (
                f"there is no module '{module}'.{nearest(part, there)} Modules are looked for in {os.getcwd()} and in "
                "PYTHONPATH."
            )
        folders = list(spec.submodule_search_locations or ())
    return spec


def _makes_modules(package: importlib.machinery.ModuleSpec) -> bool:
    """Whether a package may have modules that are not files in its folders."""
    origin = package.origin or ""
    text = Path(origin).read_text(encoding="utf-8", errors="replace") if origin.endswith(".py") else ""
    return "__path__" in text or "sys.modules" in text


def _names_of_module(tree: ast.Module) -> set[str] | None:
    """What a module defines at its top level; None where other code may add to it."""
    found: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                return None
    return None if found & {"*", "__getattr__"} else found


def bind_interface(get: Get) -> Iterator[str]:
    """A rule: `cluster.bind` is a name of an interface, and one that the nodes can share."""
    bind = get("cluster.bind")
    if not bind.strip() or "/" in bind or ":" in bind or re.fullmatch(r"[\d.]+", bind):
        yield (
            f"cluster.bind: '{bind}' is no name of a network interface, such as eth0 (`ip addr` lists them). Give one, "
            "or auto."
        )
    elif bind == LOOPBACK and get("cluster.num_nodes") > 1:
        yield (
            f"cluster.bind: {bind} is not reached from other machines, and cluster.num_nodes is "
            f"{get('cluster.num_nodes')}. Give an interface that all of them share, or auto."
        )


def _bind_is_here(get: Get) -> Iterator[str]:
    bind, here = get("cluster.bind"), [name for _, name in socket.if_nameindex()]
    if bind != "auto" and bind not in here and not any(bind_interface(get)):
        there = ", ".join(sorted(here))
        yield f"cluster.bind: this machine has no interface '{bind}', only {there}.{nearest(bind, here)} Or set auto."


def _one_worker_is_enough(get: Get) -> Iterator[str]:
    """`auto` is one worker where a run starts Ray on a machine without GPUs. Others are counted when Ray is there."""
    is_private = get("cluster.num_nodes") == 1 and not os.environ.get("RAY_ADDRESS")
    if get("cluster.gpus_per_node") == "auto" and is_private and _num_gpus() == 0:
        yield from worker_counts(get, 1)


def workers_here(num_nodes: int, gpus_per_node: int | Literal["auto"]) -> int | None:
    """How many workers a run will have, where all of them are on this machine; None where that is not known."""
    if num_nodes > 1 or os.environ.get("RAY_ADDRESS"):
        return None
    if gpus_per_node != "auto":
        return gpus_per_node
    return None if (num_gpus := gpus_here()) is None else max(num_gpus, 1)


def gpus_here() -> int | None:
    """How many GPUs of this machine CUDA shows to a process; None where the driver cannot be asked."""
    num_gpus, visible = _num_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if num_gpus is None or visible is None:
        return num_gpus
    names = takewhile(lambda name: name and not name.startswith("-"), map(str.strip, visible.split(",")))
    return min(num_gpus, len(list(names)))


def _several_nodes_are_joined(get: Get) -> Iterator[str]:
    """A Ray that is started here is on this machine alone; a caller may have joined another one in this process."""
    is_joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if (num_nodes := get("cluster.num_nodes")) > 1 and not (is_joined or os.environ.get("RAY_ADDRESS")):
        yield (
            f"cluster.num_nodes: {num_nodes} machines need a Ray cluster that is there already, and RAY_ADDRESS names "
            "none. Set RAY_ADDRESS to its address, or cluster.num_nodes=1."
        )


def _num_gpus() -> int | None:
    """Of this machine; None where the driver cannot be asked."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError_LibraryNotFound:
        return 0
    except pynvml.NVMLError:
        return None


LOCAL_PATH_RULES: tuple[Rule, ...] = tuple(partial(_is_not_empty, path) for path in LOCAL_PATHS)
TRACKERS = {
    "wandb": "uv sync --group wandb",
    "mlflow": "uv sync --group mlflow",
    "swanlab": "uv pip install swanlab",  # on other systems it needs an older protobuf than the tested one: no group
}
TRACKER_RULES: tuple[Rule, ...] = tuple(partial(_tracker_is_here, name, how) for name, how in TRACKERS.items())
MACHINE_RULES: tuple[Rule, ...] = (
    _model_is_here,
    _tokenizer_is_here,
    template_is_here,
    _transformer_engine_is_here,
    _dispatcher_is_here,
    *TRACKER_RULES,
    _programs_can_be_isolated,
    _function_is_here,
    _teacher_is_here,
    _draft_model_is_here,
    _data_is_here,
    _bind_is_here,
    _one_worker_is_enough,
    _several_nodes_are_joined,
)
