"""Rules about the machine that runs a configuration: what must be here, and what a check elsewhere says."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import save_file

from nemo_rl_offload.config.rules import machine
from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"

BY_LOSS = "checkpointing.metric_name=val:loss checkpointing.higher_is_better=false"
SFT = f"algorithm=sft {BY_LOSS}"
DISTILLATION = "algorithm=distillation distillation.num_prompts_per_step=128"


@pytest.mark.parametrize(
    ("path", "file"),
    [("policy.model_name", "config.json"), ("policy.tokenizer.name", "tokenizer_config.json")],
)
def test_folders_must_exist(check: Check, dense_model: Path, path: str, file: str) -> None:
    with pytest.raises(ConfigError, match=rf"\n{path}: 'no/such' is not a local .* with a {file} \(looked in /"):
        check(f"policy.model_name={dense_model}", f"policy.tokenizer.name={dense_model}", f"{path}=no/such")


@pytest.mark.parametrize("run_here", [True, False])
@pytest.mark.parametrize(
    "path",
    [
        *("policy.model_name", "policy.tokenizer.name", "teacher.model_name", "data.train.path"),
        *("eval.save_path", "checkpointing.checkpoint_dir"),
    ],
)
def test_no_name_is_a_problem_wherever_it_runs(check: Check, dense_model: Path, path: str, run_here: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        check(f"policy.tokenizer.name={dense_model}", "data.env_name=math", f"{path}=", run_here=run_here)
    assert f"{path}: is empty. Give a local path." in str(caught.value).splitlines()
    assert str(caught.value).count(" is empty.") == 1


def test_weights_that_are_cut_off_are_told_before_a_run(check: Check, dense_model: Path) -> None:
    file = dense_model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    try:
        with pytest.raises(
            ConfigError, match=rf"policy.model_name: {file} cannot be read: .* Is the download complete"
        ):
            check(f"policy.model_name={dense_model}")
    finally:
        file.write_bytes(whole)


def test_a_check_elsewhere_only_warns_about_missing_folders(check: Check) -> None:
    checked = check("policy.model_name=no/such", f"{M}.offload_modules=[moe_act]", run_here=False)
    missing, unknown = checked.warnings
    assert missing.startswith("policy.model_name:")
    assert missing.endswith("Only a run needs it.")
    assert "rules about the model's layers were not checked" in unknown


@pytest.mark.parametrize("run_here", [True, False])
@pytest.mark.parametrize("path", ["policy.model_name", "teacher.model_name"])
def test_a_folder_without_a_config_is_refused_wherever_it_runs(
    check: Check, dense_model: Path, tmp_path: Path, path: str, run_here: bool
) -> None:
    save_file({}, tmp_path / "model.safetensors")
    models = (f"policy.model_name={dense_model}", f"teacher.model_name={dense_model}", f"{path}={tmp_path}")
    with pytest.raises(ConfigError) as caught:
        check(*DISTILLATION.split(), *models, f"policy.tokenizer.name={dense_model}", run_here=run_here)
    said = f"{path}: the folder {tmp_path} has no config.json. Is the download complete?"
    assert str(caught.value).splitlines()[1:] == [said]


def test_a_tokenizer_of_its_own_is_told_of_beside_the_model(check: Check) -> None:
    checked = check("policy.model_name=no/such", "policy.tokenizer.name=nor/such", run_here=False)
    assert [warning.split(":")[0] for warning in checked.warnings[:2]] == ["policy.model_name", "policy.tokenizer.name"]


@pytest.mark.parametrize("bind", ["", "127.0.0.1", "0.0.0.0", "'::'", "'fd00::2'", "10.0.0.0/8", "'eth0:1'"])
def test_an_address_is_no_interface(refuses: Callable[..., None], bind: str) -> None:
    refuses(f"cluster.bind={bind}", "cluster.bind", "is no name of a network interface", "cluster.bind=eth7")


def test_other_machines_do_not_reach_loopback(refuses: Callable[..., None]) -> None:
    nodes = "cluster.num_nodes=2 cluster.bind"
    refuses(f"{nodes}=lo", "cluster.bind", "is not reached from other machines", f"{nodes}=auto")
    refuses(f"{nodes}=lo", "cluster.bind", "cluster.num_nodes is 2", "cluster.num_nodes=1 cluster.bind=lo")


@pytest.mark.parametrize("run_here", [True, False])
def test_an_interface_must_be_here(check: Check, run_here: bool) -> None:
    assert check("cluster.bind=lo", run_here=run_here).config["cluster"]["bind"] == "lo"
    said = "cluster.bind: this machine has no interface 'loo', only "
    if run_here:
        with pytest.raises(ConfigError, match=rf"\n{said}.*Did you mean 'lo'\?"):
            check("cluster.bind=loo")
    else:
        assert any(said in warning for warning in check("cluster.bind=loo", run_here=False).warnings)


@pytest.mark.parametrize(
    ("model", "legal", "refused"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "mlp_act", "moe_act"),
        ("Qwen/Qwen3-30B-A3B", "moe_act", "mlp_act"),
        ("deepseek-ai/DeepSeek-V3", "[moe_act,mlp_act]", None),
        ("openai/gpt-oss-120b", "expert_fc1", "mlp_fc1"),
    ],
)
def test_public_models_need_no_folder(check: Check, model: str, legal: str, refused: str | None) -> None:
    def warnings(modules: str) -> list[str]:
        overrides = [f"policy.model_name={model}", f"{M}.offload_modules=[{modules.strip('[]')}]"]
        return check(*overrides, run_here=False).warnings

    assert all(line.endswith("Only a run needs it.") for line in warnings(legal))
    if refused is not None:
        with pytest.raises(ConfigError, match=f"'{refused}' needs layers with"):
            warnings(refused)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_broken_model_folder_is_one_problem(check: Check, make_model: MakeModel, content: str) -> None:
    model = make_model()
    (model / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"1 problem\npolicy\.model_name: .*config\.json"):
        check(f"policy.model_name={model}", f"{M}.offload_modules=[moe_act]")


@pytest.mark.parametrize("name", machine.TRACKERS)
def test_a_tracker_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    values = {f"logger.{other}_enabled": other == name for other in machine.TRACKERS}
    problems = [line for rule in machine.TRACKER_RULES for line in rule(values.__getitem__)]
    fix = f"Install it (`{machine.TRACKERS[name]}`), or set this to false."
    assert problems == [f"logger.{name}_enabled: the package {name} is not installed. {fix}"]
    monkeypatch.setattr(machine, "find_spec", lambda _: object())
    assert [line for rule in machine.TRACKER_RULES for line in rule(values.__getitem__)] == []


def test_transformer_engine_must_be_here_for_a_run(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [f"{M}.transformer_impl=transformer_engine", f"{M}.offload_modules=[core_attn]"]
    engine = [f"{M}.activation_offload.engine=megatron"]
    monkeypatch.setattr(machine, "have_transformer_engine", lambda: False)
    with pytest.raises(ConfigError, match=r"\.transformer_impl: transformer_engine is not installed here"):
        check(*overrides)
    (warning,) = check(*overrides, run_here=False).warnings
    assert warning.endswith("Only a run needs it.")
    with pytest.raises(ConfigError, match=r"\.activation_offload\.engine: megatron needs Transformer Engine, which is"):
        check(*overrides, *engine, f"{M}.transformer_impl=auto")
    monkeypatch.setattr(machine, "have_transformer_engine", lambda: True)
    assert check(*overrides, *engine).warnings == []


def test_files_and_teacher_must_exist(check: Check, dense_model: Path) -> None:
    sft = [*SFT.split(), f"policy.model_name={dense_model}"]
    with pytest.raises(ConfigError, match=r"\ndata\.train\.path: 'no/such' is not there \(looked in /"):
        check(*sft, "data.train.path=no/such", "data.validation.path=README.md")
    for key in ("prompt_file", "system_prompt_file"):
        with pytest.raises(
            ConfigError, match=rf"\ndata\.{key}: 'no/such' is not there \(looked in /.* Give a local path, or null\."
        ):
            check(f"policy.model_name={dense_model}", f"data.{key}=no/such")
    teacher = [*DISTILLATION.split(), f"policy.model_name={dense_model}", "teacher.model_name=no/such"]
    with pytest.raises(ConfigError, match=r"\nteacher\.model_name: 'no/such' is not a local"):
        check(*teacher)
    assert len(check(*teacher, run_here=False).warnings) >= 1


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (None, r"model\.safetensors\.index\.json\. Is the download complete\?"),
        ("pytorch_model.bin", r"pytorch_model\.bin is not read: .* save_pretrained"),
    ],
)
@pytest.mark.parametrize("key", ["policy.model_name", "teacher.model_name"])
def test_a_model_needs_weights(
    key: str, file: str | None, words: str, check: Check, dense_model: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((dense_model / name).read_bytes())
    if file is not None:
        (tmp_path / file).touch()
    overrides = [*DISTILLATION.split(), f"teacher.model_name={dense_model}", f"{key}={tmp_path}"]
    with pytest.raises(ConfigError, match=rf"\n{key}: {tmp_path} has a config\.json and no weights: .*{words}"):
        check(*overrides)
    (told,) = [line for line in check(*overrides, run_here=False).warnings if "no weights" in line]
    assert told.endswith("Only a run needs it.")
    save_file({}, tmp_path / "model-00001-of-00002.safetensors")
    check(*overrides)


def test_several_nodes_need_a_cluster(check: Check, dense_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"\ncluster\.num_nodes: 2 machines need a Ray cluster .* Set RAY_ADDRESS"):
        check("cluster.num_nodes=2")
    assert any("RAY_ADDRESS" in line for line in check("cluster.num_nodes=2", run_here=False).warnings)
    with monkeypatch.context() as joined:
        joined.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))  # type: ignore[arg-type]
        check("cluster.num_nodes=2")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check("cluster.num_nodes=2")


MODULE = """
import what_is_not_here

def judge(messages, entry, bonus, *, limit=1): ...

@decorator
def wrapped(messages, entry): ...

def anything(messages, entry, **others): ...

def of_one(response): ...

def of_any(*everything): ...

number = 3

async def later(messages, entry): ...

def one_by_one(messages, entry):
    for message in messages:
        yield message

class Kind: ...

made = print

def of_trl(prompts, completions, **kwargs):
    return [0.0 for _ in completions]

def with_inner(messages, entry):
    def inner():
        yield 1
    return len(list(inner()))
"""


@pytest.fixture
def faults(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Problems, by lines, of a function of the module `kit.scores`, or `made`, which defines names as it runs."""
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "scores.py").write_text(MODULE)
    (tmp_path / "kit" / "made.py").write_text("globals().update(judge=print)")
    (tmp_path / "kit" / "kit.py").write_text(MODULE)
    (tmp_path / "maker").mkdir()
    (tmp_path / "maker" / "__init__.py").write_text("__path__.append('elsewhere')")
    (tmp_path / "kit" / "broken.py").write_text("def judge(:")
    (tmp_path / "problems.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)

    def found(path: str, params: str = "{}", *, run_here: bool = True) -> list[str]:
        overrides = [f"env.function.path={path}", f"env.function.params={params}", "data.env_name=function"]
        files = [f"data.{split}.path=problems.jsonl" for split in ("train", "validation")]
        try:
            check(*overrides, *files, run_here=run_here)
        except ConfigError as error:
            return str(error).splitlines()[1:]
        return []

    return found


@pytest.mark.parametrize(
    ("path", "params", "words"),
    [
        ("kit.score:judge", "{bonus: 1}", "path: there is no module 'kit.score'. Did you mean 'scores'?"),
        ("rewards:judge", "{}", "path: there is no module 'rewards'. "),
        ("kitt:judge", "{bonus: 1}", "path: there is no module 'kitt'. Did you mean 'kit'?"),
        ("kit.scores.inner:judge", "{bonus: 1}", "path: there is no module 'kit.scores.inner'."),
        ("kit.kit.kit:judge", "{}", "path: there is no module 'kit.kit.kit'."),
        ("kit.scores:juge", "{}", "has no function 'juge'. Did you mean 'judge'?"),
        ("kit.broken:judge", "{}", "broken.py:1: invalid syntax"),
        ("kit.scores:judge", "{bonus: 1, limt: 2}", "params.limt: not a parameter of judge. Did you mean 'limit'?"),
        ("kit.scores:judge", "{bonus: 1, entry: 2}", "params.entry: not a parameter of judge. It takes: bonus, limit."),
        ("kit.scores:judge", "{bonus: 1, entry: 2}", "Remove it: ~env.function.params.entry. In a file that inherits"),
        ("kit.scores:of_one", "{}", "of_one(response) cannot be called as function(messages, entry, **params)."),
        (
            "kit.scores:of_trl",
            "{}",
            "so TRL's reward(prompts, completions, **kwargs) that reads text is adapted by def score(messages, ",
        ),
        ("kit.scores:judge", "{}", "a call is judge(messages, entry, **params), and entry is the problem's record"),
        ("kit.scores:number", "{}", "path: kit.scores:number is the value 3, and not a function that returns a reward"),
        ("kit.scores:later", "{}", "is a coroutine (async def)"),
        ("kit.scores:one_by_one", "{}", "is a generator"),
        ("kit.scores:Kind", "{}", "is a class"),
    ],
)
def test_functions(faults: Callable[..., list[str]], path: str, params: str, words: str) -> None:
    (line,) = faults(path, params)
    assert line.startswith("env.function.")
    assert words in line
    assert "sre_parse" not in line, "of the standard library"
    is_elsewhere = "there is no module" in words
    assert faults(path, params, run_here=False) == ([] if is_elsewhere else [line]), "a module may be elsewhere"


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("kit.scores:judge", "{bonus: 1}"),
        ("kit.scores:judge", "{bonus: 1, limit: 2}"),
        ("kit.scores:wrapped", "{whatever: 1}"),
        ("kit.scores:anything", "{whatever: 1}"),
        ("kit.scores:of_any", "{}"),
        ("kit.scores:made", "{}"),
        ("kit.scores:with_inner", "{}"),
        ("kit.made:judge", "{whatever: 1}"),
        ("kit.kit:judge", "{bonus: 1}"),
        ("maker.anything:judge", "{}"),
        ("math:sqrt", "{}"),
        ("os.path:join", "{}"),
        ("reasoning_gym.utils:extract_answer", "{}"),
    ],
)
def test_functions_that_may_be_there(faults: Callable[..., list[str]], path: str, params: str) -> None:
    assert faults(path, params) == []


@pytest.mark.parametrize("num_gpus", [0, None, 2])
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("pipeline_model_parallel_size=2", "= 2 does not divide 1 worker(s)"),
        ("expert_model_parallel_size=2", "expert_model_parallel_size: 2 does not divide the 1"),
        ("pipeline_model_parallel_size=1", ""),
    ],
)
def test_a_machine_without_gpus_has_one_worker_whose_number_is_known_before_ray_is_there(
    sizes: str,
    words: str,
    num_gpus: int | None,
    check: Check,
    moe_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_num_gpus", lambda: num_gpus)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    changes = (f"policy.model_name={moe_model}", f"policy.tokenizer.name={moe_model}", f"{M}.{sizes}")
    offloading = f"{M}.fine_grained_activation_offloading=false"

    def said(*, run_here: bool) -> bool:
        """Whether it is an error for a run, and a warning elsewhere."""
        try:
            checked = check(*changes, offloading, "cluster.gpus_per_node=auto", run_here=run_here)
        except ConfigError as error:
            assert run_here
            return words in str(error)
        return not run_here and any(words in warning for warning in checked.warnings)

    is_known = bool(words) and num_gpus == 0
    assert said(run_here=True) == is_known
    if words:
        assert said(run_here=False) == is_known
        monkeypatch.setenv("RAY_ADDRESS", "there:6379")
        assert not said(run_here=True), "a cluster that is joined may have others"


def test_a_split_of_one_file_has_no_effect(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.touch()
    words = ("algorithm=dpo", "checkpointing.metric_name=null", f"data.validation.path={tmp_path}")
    given = (*words, f"data.train.path={file}", "data.validation.split=foo")
    said = f"data.train.split: foo has no effect, since {file} is one file. Set it to null."
    assert said in check(*given, "data.train.split=foo").warnings
    assert "data.train.split" not in "".join(check(*given).warnings)
    assert "data.validation.split" not in "".join(check(*given).warnings), "a folder has several"


def test_programs_are_isolated_or_the_run_is_refused(
    check: Check, dense_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "problems.jsonl").touch()
    files = " ".join(f"data.{split}.path={tmp_path}/problems.jsonl" for split in ("train", "validation"))
    given = f"policy.model_name={dense_model} data.env_name=code_tests {files}"
    monkeypatch.setattr(machine.sandbox, "missing", lambda: "the kernel has no walls")
    with pytest.raises(ConfigError, match=r"env\.code_tests\.sandbox: .* here: the kernel has no walls\. .* off where"):
        check(*given.split())
    assert any("the kernel has no walls" in text for text in check(*given.split(), run_here=False).warnings)
    check(*given.split(), "env.code_tests.sandbox=off")
    check(f"policy.model_name={dense_model}")
    monkeypatch.setattr(machine.sandbox, "missing", lambda: None)
    check(*given.split())
