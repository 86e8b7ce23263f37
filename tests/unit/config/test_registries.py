"""What is known of algorithms, environments, offload modules and devices stands in one place each; and plugins."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, TypedDict, get_args

import pytest

from nemo_rl_offload.cli.command_line import main
from nemo_rl_offload.config import plugins, validation
from nemo_rl_offload.config.algorithms import ALGORITHMS, AlgorithmSpec
from nemo_rl_offload.config.environments import ENVIRONMENTS, EnvironmentSpec
from nemo_rl_offload.config.full_schema import OTHER_NAMES, full_schema, right_place, section_at
from nemo_rl_offload.config.loader import PROJECT_ROOT, read_config
from nemo_rl_offload.config.plugins import import_object
from nemo_rl_offload.config.rules import effects
from nemo_rl_offload.config.schema import CheckpointingConfig, EnvConfig, LossConfig, MasterConfig, SFTConfig
from nemo_rl_offload.config.types import Default, Positive, closed, defaults_of, describe, keys_of
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.losses.registry import LOSSES, rows_per_sample
from nemo_rl_offload.specs.devices import DEVICES

PACKAGE = PROJECT_ROOT / "nemo_rl_offload"
OF_ALGORITHMS = {
    "config/algorithms.py",
    *(f"config/nemo_rl/{name}.py" for name in ("table", "translation", "evaluation")),  # names of NeMo-RL's sections
    *("config/schema.py", "config/sections/algorithms.py"),  # the default, and an estimator of advantages
    "losses/registry.py",  # names of losses
    *(f"algorithms/{name}.py" for name in ALGORITHMS.built_in),
}
LOOK_UPS = (ast.Subscript, ast.Call)
"""What reads a section, or passes a name on, and decides nothing."""


def namings(root: Path, names: set[str], *, without: tuple[type[ast.AST], ...] = ()) -> set[str]:
    """Return the files, by their path in the package, that have one of these names as a text of its own."""
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            texts = [child.value for child in ast.iter_child_nodes(node) if isinstance(child, ast.Constant)]
            if not isinstance(node, without) and names & {text for text in texts if isinstance(text, str)}:
                found.add(path.relative_to(root).as_posix())
    return found


def test_no_other_file_names_an_algorithm() -> None:
    assert namings(PACKAGE, {*ALGORITHMS.built_in}) <= OF_ALGORITHMS


def test_no_other_file_decides_by_the_name_of_an_environment() -> None:
    assert namings(PACKAGE, {*ENVIRONMENTS.built_in}, without=LOOK_UPS) == {
        *("config/environments.py", "config/nemo_rl/gym.py"),  # NeMo-RL's names of its section
        *("specs/chat_template.py", "generation/vllm/chat_parsers.py"),  # "function" in OpenAI's calls
    }


@pytest.mark.parametrize(
    "line", ['if algorithm == "dpo":\n    pass', 'x = {"sft": 1}', 'x = ("grpo", 1)', 'def f(x="distillation"): ...']
)
def test_a_planted_name_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(line)
    (tmp_path / "sound.py").write_text(
        '"""Nothing of dpo."""\nx = get("grpo.seed"), f"{algorithm}.seed", config["s"]\n'
    )
    for without in ((), LOOK_UPS):
        assert namings(tmp_path, {*ALGORITHMS.built_in}, without=without) == {"rules.py"}


def test_the_schema_has_what_is_registered() -> None:
    assert describe(keys_of(MasterConfig)["algorithm"]) == "'grpo' or 'sft' or 'dpo' or 'distillation'"
    names = "'reasoning_gym' or 'math' or 'math_multi_reward' or 'code_tests' or 'function' or 'nemo_gym'"
    assert describe(keys_of(keys_of(MasterConfig)["data"])["env_name"]) == names
    assert keys_of(MasterConfig).keys() >= ALGORITHMS.built_in.keys()
    assert keys_of(EnvConfig).keys() == ENVIRONMENTS.built_in.keys()
    assert full_schema() is MasterConfig


@pytest.mark.parametrize("spec", ALGORITHMS.built_in.values(), ids=lambda spec: spec.name)
def test_a_spec_agrees_with_its_loss_its_section_and_its_example(spec: AlgorithmSpec) -> None:
    assert rows_per_sample(spec.loss) == spec.rows_per_sample
    arguments = {field.name for field in fields(LOSSES[spec.loss])}
    if spec.loss_fn_keys:
        assert arguments == {*spec.loss_fn_keys}
    else:
        assert arguments <= keys_of(keys_of(MasterConfig)[spec.name]).keys()
    assert {*spec.metrics} <= {*get_args(keys_of(CheckpointingConfig)["metric_name"])}
    assert callable(import_object(spec.runner))
    assert read_config(PROJECT_ROOT / spec.example).values["algorithm"] == spec.name


def test_each_key_of_loss_fn_is_read_by_some_algorithm() -> None:
    assert {key for spec in ALGORITHMS.built_in.values() for key in spec.loss_fn_keys} == keys_of(LossConfig).keys()


@pytest.mark.parametrize("spec", ENVIRONMENTS.built_in.values(), ids=lambda spec: spec.name)
def test_an_environment_has_a_scorer_and_workers(spec: EnvironmentSpec) -> None:
    if spec.scorer is None:
        assert spec.leads_episodes
        return
    assert callable(import_object(spec.scorer).step)
    assert "num_workers" in keys_of(keys_of(EnvConfig)[spec.name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qkv_linear", "expert_fc2"])
def test_an_offload_module_has_at_most_four_places(name: str) -> None:
    others = ("bench/", "adapters/module_resolver.py")  # a choice to measure; Hugging Face models
    places = {path for path in namings(PACKAGE, {name}) if not path.startswith(others)}
    assert places >= {"specs/offload_modules.py", "planner/cost/activations.py", "planner/cost/flops.py"}
    assert len(places) <= 4


def test_a_device_has_one_place() -> None:
    names = {*DEVICES, *(name.partition("-")[0] for name in DEVICES)}
    assert namings(PACKAGE, names) == {"specs/devices.py"}


@closed
class ToyConfig(SFTConfig):
    strength: Annotated[Positive, Default(3)]


@closed
class ToyScorerConfig(TypedDict):
    num_workers: Annotated[Positive, Default(2)]


TOY = AlgorithmSpec(
    name="toy",
    section=ToyConfig,
    runner="nowhere:run",
    loss="nowhere:Loss",
    learns_from="conversations",
    metrics=("train:loss", "val:toys"),
    example="toy.yaml",
)
TOY_SCORER = EnvironmentSpec(name="toy_scorer", section=ToyScorerConfig, scorer="nowhere:Scorer")
TOY_PATHS = (f"{__name__}:TOY", f"{__name__}:TOY_SCORER")
NO_SECTION = EnvironmentSpec(name="bare", scorer="nowhere:Scorer")
TAKEN = AlgorithmSpec(
    name="dpo", section=ToyConfig, runner="", loss="", learns_from="pairs", metrics=("train:loss",), example=""
)
SECTION = AlgorithmSpec(
    name="policy", section=ToyConfig, runner="", loss="", learns_from="pairs", metrics=("train:loss",), example=""
)
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Have these objects as plugins; they are gone afterwards."""
    caches = (plugins.plugin_specs, full_schema, validation._adapter, effects.defaults)

    def forget() -> None:
        for cached in caches:
            cached.cache_clear()

    def have(*paths: str) -> None:
        entries = [EntryPoint(f"plugin{i}", path, plugins.GROUP) for i, path in enumerate(paths)]
        monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
        forget()

    yield have
    monkeypatch.undo()
    forget()


def messages(*overrides: str) -> tuple[list[str], list[str]]:
    found = validation.examine(read_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml", overrides), run_here=True)
    return [str(problem).partition(" (")[0] for problem in found.problems], [str(each) for each in found.warnings]


def test_plugins_are_checked_like_the_packages_own(install: Install) -> None:
    install(*TOY_PATHS)
    (problem,) = messages("algorithm=toi")[0]
    assert problem == (
        "algorithm: \"toi\" is not allowed. Allowed: 'grpo' or 'sft' or 'dpo' or 'distillation' or 'toy'. "
        "Did you mean 'toy'?"
    )
    assert messages("toy.strength=0")[0] == ["toy.strength: 0 is not allowed. Allowed: a whole number above 0."]
    assert messages("env.toy_scorer.num_workers=a")[0] == [
        'env.toy_scorer.num_workers: "a" is not allowed. Allowed: a whole number above 0.'
    ]
    assert messages()[0] == []
    assert messages("algorithm=toy", "checkpointing.metric_name=train:loss")[0] == []
    metric = "checkpointing.metric_name"
    assert messages(f"{metric}=val:toys")[0] == [f"{metric}: sft has no val:toys. Allowed: val:loss, train:loss."]
    of_file = "data.train.path: missing value; data.env_name toy_scorer takes problems from a file. Give one"
    assert any(each.startswith(of_file) for each in messages("algorithm=grpo", "data.env_name=toy_scorer")[0])


def test_what_a_plugin_is_told_in_vain_is_said(install: Install) -> None:
    install(*TOY_PATHS)
    assert any("toy.strength: 4 has no effect with algorithm sft" in each for each in messages("toy.strength=4")[1])
    assert not any("toy" in each for each in messages()[1])


def test_overrides_leave_the_defaults_alone(install: Install) -> None:
    install(*TOY_PATHS)
    messages("toy.strength=4")
    assert read_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml").values["toy"] == defaults_of(ToyConfig)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("no_such_module:SPEC",), "plugin plugin0 (no_such_module:SPEC): does not import: ModuleNotFoundError"),
        ((f"{__name__}:NOTHING",), f"plugin plugin0 ({__name__}:NOTHING): does not import: AttributeError"),
        ((f"{__name__}:OF_ALGORITHMS",), f"plugin plugin0 ({__name__}:OF_ALGORITHMS): is set, not an AlgorithmSpec"),
        ((f"{__name__}:NO_SECTION",), f"plugin plugin0 ({__name__}:NO_SECTION): gives no section."),
        ((f"{__name__}:TAKEN",), "plugin: the name dpo is taken by this package's own. Give another name."),
        ((f"{__name__}:TOY", f"{__name__}:TOY"), "plugin: two plugins have the name toy."),
    ],
)
@pytest.mark.parametrize("arguments", [("check", "examples/configs/sft_tiny.yaml"), ("run", "sft")])
def test_a_broken_plugin_is_named(
    paths: tuple[str, ...],
    message: str,
    arguments: tuple[str, ...],
    install: Install,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(*paths)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_plugins_section_has_a_name_of_its_own(install: Install) -> None:
    install(f"{__name__}:SECTION")
    with pytest.raises(ConfigError, match="the name policy is that of another section"):
        full_schema()


def test_a_path_that_does_not_import_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^no_such_module:Loss: does not import: ModuleNotFoundError"):
        rows_per_sample("no_such_module:Loss")


def test_without_plugins_nothing_is_added() -> None:
    assert [*ALGORITHMS] == [*ALGORITHMS.built_in]
    assert "toy" not in read_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml").values


def test_names_of_other_programs_lead_to_keys() -> None:
    for name, path in OTHER_NAMES.items():
        *section, key = path.split(".")
        assert key in keys_of(section_at(section)), path
        assert right_place(name, section_at(["policy"])) == f" Here it is {path}."
