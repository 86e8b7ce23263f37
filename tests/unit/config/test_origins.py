"""Every problem says where its value was written."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.config.loader import read_config
from nemo_rl_offload.config.sources import OVERRIDE
from nemo_rl_offload.config.validation import examine

FILES = {
    "base": "model: {name: x, size: 1}\nlist:\n- a\n- b\nkept: 1\nalias: ${model.name}\n",
    "middle": "defaults: base.yaml\nmodel:\n  size: 2\n",
    "top": "# a comment\ndefaults: middle.yaml\nlist: [c]\n\nmodel:\n  'new': {deep: 3}\n",
}


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "top.yaml"


@pytest.mark.parametrize(
    ("overrides", "path", "place"),
    [
        ([], "kept", "base.yaml:5"),
        ([], "model.name", "base.yaml:1"),
        ([], "model.size", "middle.yaml:3"),
        ([], "model.new.deep", "top.yaml:6"),
        ([], "model", "top.yaml:5"),
        ([], "list.0", "top.yaml:3"),
        ([], "list.1", "top.yaml:3"),  # the base's second item is gone
        ([], "model.missing.too", "top.yaml:5"),
        ([], "alias", "base.yaml:6, from base.yaml:1"),
        (["model.name=y"], "alias", f"base.yaml:6, from {OVERRIDE}"),
        (["alias=y"], "alias", OVERRIDE),
        (["+model.a.b=1"], "model.a.b", OVERRIDE),
        (["model={size: 3}"], "model.size", OVERRIDE),
        (["model={size: 3}"], "model.name", "base.yaml:1"),
        (["~model.size"], "model.size", OVERRIDE),
        (["~model.size"], "model.name", "base.yaml:1"),
        (["list=null"], "list.0", OVERRIDE),
        ([], "nothing", ""),
    ],
)
def test_origins(top: Path, overrides: list[str], path: str, place: str) -> None:
    assert read_config(top, overrides).origin(path).replace(f"{top.parent}/", "") == place


@given(lines=st.lists(st.sampled_from(["a: 1", "b: {c: 1}", "d: [1]", "# x", "", "e:\n  f: 2"]), unique=True))
@settings(max_examples=40, deadline=None)
def test_a_place_holds_its_key(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.yaml"
    path.write_text("\n".join(["z: 0", *lines]))
    written = path.read_text().splitlines()
    origins = read_config(path).origins
    assert {name.split(".")[0] for name in origins} == {line[0] for line in ["z", *lines] if line and line[0] != "#"}
    for name, origin in origins.items():
        key, line = name.split(".")[-1], written[int(origin.rpartition(":")[2]) - 1]
        assert f"{key}:" in line or (key == "0" and "[1]" in line)


def test_problems_and_warnings_end_with_the_place(tmp_path: Path, configs: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: {configs / 'grpo_tiny.yaml'}\ngrpo:\n  seed: -1\n  sede: 2\n  val_at_end: ???\n")
    overrides = ["policy.train_micro_batch_size=60", "nowhere=1", "policy.megatron_cfg.recompute_method=block"]
    found = examine(read_config(path, overrides), run_here=False)
    assert found.config is None
    assert {problem.path: str(problem).rpartition(" (")[2] for problem in found.problems[1:]} == {
        "grpo.seed": f"{path}:3)",
        "grpo.sede": f"{path}:4)",
        "grpo.val_at_end": f"{path}:5)",
        "policy.train_global_batch_size": f"{configs / 'grpo_tiny.yaml'}:7)",
    }
    assert str(found.problems[0]).startswith("override 'nowhere=1': no key nowhere to change.")
    assert [str(warning).rpartition(" (")[2] for warning in found.warnings] == [f"{OVERRIDE})"]


def test_a_section_may_replace_what_it_inherits(top: Path) -> None:
    top.write_text(
        "defaults: middle.yaml\nalias: 1\nmodel: {_override_: true, size: 3}\nfresh: {_override_: true, a: 1}\n"
    )
    config = read_config(top).values
    assert config["model"] == {"size": 3}
    assert config["fresh"] == {"a": 1}


def test_arithmetic_in_interpolations(top: Path) -> None:
    top.write_text(
        "defaults: middle.yaml\na: ${mul:${model.size}, 3}\nb: ${max:${div:9,2},1}\nc: ${sub:${add:1,2},3}\n"
    )
    assert {key: read_config(top).values[key] for key in "abc"} == {"a": 6, "b": 4.5, "c": 0}
