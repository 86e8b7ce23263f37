"""Every snippet of README.md and docs/ is of use as it stands: YAML is accepted, commands parse, Python runs.
What a page links to, or names as a place in the code, is there.

What the pages show as mistakes, and what the snippets of docs/offload.md do, `test_config_reference.py` and
`tests/functional/test_offload_docs.py` test.
"""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_layers import LAYERS

from nemo_rl_offload.cli import command_line as cli
from nemo_rl_offload.cli.check import check_file
from nemo_rl_offload.cli.parser import build_parser
from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.loader import PROJECT_ROOT, read_config
from nemo_rl_offload.config.rules.nemo_gym import PYTHON, VERSION
from nemo_rl_offload.specs.devices import find_device

EXAMPLE = PROJECT_ROOT / "examples/smollm2/README.md"
PAGES = [PROJECT_ROOT / "README.md", *sorted((PROJECT_ROOT / "docs").glob("*.md")), EXAMPLE]
PAGES = [page for page in PAGES if page.name not in ("decisions.md", "benchmarks.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
FOLDERS = ("benchmarks", "examples/cluster")
_PROJECT = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())
GROUPS, EXTRAS = _PROJECT["dependency-groups"], _PROJECT["project"]["optional-dependencies"]
BASES = {"moe_": "grpo_moe_megatron.yaml", "gpus_per_node: 8": "grpo_math_1B.yaml", "": "grpo_tiny.yaml"}
"""What a snippet is laid over, by a word in it."""


def snippets(language: str) -> list[Any]:
    found = [
        pytest.param(text, id=f"{page.name}:{index}")
        for page in PAGES
        for index, (name, text) in enumerate(BLOCK.findall(page.read_text()))
        if name == language
    ]
    assert found
    return found


def commands() -> list[Any]:
    """Each command of the pages' blocks and lines, in words."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = [block for name, block in BLOCK.findall(text) if not name]
        lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", "").splitlines()]
        lines += re.findall(r"`((?:nemo-rl-offload|uv run) [^`]+)`", BLOCK.sub("", text))
        for line in lines:
            if re.match(r"(nemo-rl-offload|uv|pip|python|bash) ", line):
                parts = [part.strip() for part in line.partition("  #")[0].split("&&")]
                found += [pytest.param(shlex.split(part), id=f"{page.name}: {part}") for part in parts]
    assert len(found) > 30
    return found


@pytest.mark.parametrize("text", snippets("yaml"))
def test_yaml_is_a_configuration_that_check_accepts_or_a_device(text: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    if "like" in yaml.safe_load(text):
        path.write_text(text)
        assert find_device(str(path)).name == "my"
        return
    if not text.startswith("defaults:"):
        base = next(base for word, base in BASES.items() if word in text)
        text = f"defaults: examples/configs/{base}\n{text}"
    path.write_text(text)
    found = check_file(path, [])
    if "offload_module:" in text:  # a mistake that the page shows
        assert len(found.problems) == 2
        return
    assert found.problems == []
    assert [str(warning) for warning in found.warnings if "Only a run needs it" not in str(warning)] == []


@pytest.mark.parametrize("words", commands())
def test_a_command_can_be_given(words: list[str]) -> None:
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        if words[0] in ("--group", "--extra"):
            assert words[1] in (GROUPS if words[0] == "--group" else EXTRAS)
            words = words[2:]
    if words[:2] == ["uv", "export"]:
        assert words[words.index("--extra") + 1] in EXTRAS
    elif words[:2] in (["uv", "venv"], ["uv", "pip"]):
        assert str(PYTHON.parent.parent) == words[-1] or words[-3:] == ["--python", str(PYTHON), f"nemo-gym=={VERSION}"]
    elif words[0] == "nemo-rl-offload":
        check_ours(words[1:])
    elif script := re.fullmatch(r"examples/run_(\w+)\.py", words[1] if words[1:] else ""):
        check_ours(["run", script[1], *words[2:]])
    else:
        assert words[0] in ("pip", "pytest", "python", "ruff", "mypy", "mkdocs", "bash")
        assert all((PROJECT_ROOT / word).exists() for word in words if "/" in word)


def check_ours(words: list[str]) -> None:
    words = [word.replace("ALGORITHM", "grpo").replace("=N", "=1") for word in words if word != "$SMALL"]
    if len(words) == 1:  # the name alone, in a sentence
        assert words[0] in cli._EXECUTE
        return
    options, overrides = build_parser().parse_known_args(words)
    assert not [word for word in overrides if word.startswith("-")]
    if overrides:
        algorithm = getattr(options, "algorithm", "grpo")
        assert read_config(PROJECT_ROOT / ALGORITHMS[algorithm].example, overrides).problems == []


@pytest.mark.parametrize("text", snippets("python"))
def test_python_compiles(text: str) -> None:
    compile(text, "documentation", "exec")


def test_the_functions_of_the_page_on_algorithms_score() -> None:
    text, adapter = re.findall(r"```python\n(.*?)```", (PROJECT_ROOT / "docs/algorithms.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(text, names)
    right, wrong = ([{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": said}] for said in "23")
    assert names["score"](right, {"answer": "2"}) == 1.0
    assert names["score"](wrong, {"answer": "2"}) == {"reward": 0.0, "observation": "No. Try again: "}

    def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        assert prompts == ["1 + 1"]
        return [float(completions == answer)]

    exec(adapter, names := {"reward": reward})
    assert [names["score"](said, {"answer": "2"}) for said in (right, wrong)] == [1.0, 0.0]


def test_links_lead_somewhere() -> None:
    pages = [
        *PAGES,
        *(PROJECT_ROOT / "docs").glob("*.md"),
        *(PROJECT_ROOT / folder / "README.md" for folder in FOLDERS),
    ]
    targets = [(page, target) for page in pages for target in LINK.findall(page.read_text(encoding="utf-8"))]
    assert len(targets) > 50
    assert [(page.name, target) for page, target in targets if not (page.parent / target).exists()] == []


def places() -> list[Any]:
    """Each path that the page on the structure names, with the names in brackets behind it."""
    text = (PROJECT_ROOT / "docs/structure.md").read_text(encoding="utf-8")
    found = re.findall(r"`([\w./]+\.(?:py|yaml))`(?: \(`(\w+)`\))?", text)
    assert len(found) > 30
    return [pytest.param(path, name, id=f"{path} {name}") for path, name in dict.fromkeys(found)]


@pytest.mark.parametrize(("path", "name"), places())
def test_the_page_on_the_structure_names_what_is_there(path: str, name: str) -> None:
    files = [root / path for root in (PROJECT_ROOT / "nemo_rl_offload", PROJECT_ROOT) if (root / path).is_file()]
    assert files, f"docs/structure.md names {path}"
    assert re.search(rf"\b{name}\b" if name else "", files[0].read_text(encoding="utf-8"))


def test_the_page_on_the_structure_draws_the_package() -> None:
    (tree,) = re.findall(r"```\n(.*?)```", (PROJECT_ROOT / "docs/structure.md").read_text(encoding="utf-8"), re.DOTALL)
    drawn = {
        name for line in tree.splitlines() if line.startswith("  ") for name in re.findall(r"(\w+)/(?= |$)", line[:25])
    }
    folders = {path.parent.name for path in (PROJECT_ROOT / "nemo_rl_offload").glob("*/__init__.py")}
    assert drawn == folders


def test_the_page_on_the_structure_has_the_direction_of_imports() -> None:
    text = (PROJECT_ROOT / "docs/structure.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^errors, units →[^`]*?\n\n", text, re.MULTILINE)
    assert tuple(re.findall(r"\w+", line)) == LAYERS
