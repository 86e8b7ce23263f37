import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_rl_offload.config import loader
from nemo_rl_offload.config.loader import load_config, read_config, resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.sources import OVERRIDE
from nemo_rl_offload.errors import ConfigError, shortened
from nemo_rl_offload.units import parse_bytes

KEYS = st.sampled_from(["a", "b", "c"])
LEAVES = st.none() | st.booleans() | st.integers(-3, 3)
TREES = st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)
MAPPINGS = st.dictionaries(KEYS, TREES, max_size=3)


def write(folder: Path, **files: str) -> Path:
    """Write NAME=TEXT to NAME.yaml; return the last one's path."""
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.write_text(text)
    return path


@given(layers=st.lists(MAPPINGS, min_size=1, max_size=3), own=MAPPINGS)
@settings(max_examples=40, deadline=None)
def test_inheritance_merges_as_omegaconf_does(
    tmp_path_factory: pytest.TempPathFactory, layers: list[dict[str, Any]], own: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("layers")
    names = [f"layer_{index}.yaml" for index in range(len(layers))]
    for name, layer in zip(names, layers, strict=True):
        (folder / name).write_text(yaml.safe_dump(layer))
    (folder / "own.yaml").write_text(yaml.safe_dump({"defaults": names, **own}))
    expected = OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.create, [*layers, own])))
    assert load_config(folder / "own.yaml") == expected


@pytest.mark.parametrize("own", ["[3]", "[]", "text", "null"])
def test_lists_are_replaced(tmp_path: Path, own: str) -> None:
    path = write(tmp_path, base="a: [1, 2]\nb: {c: 1}\n", top=f"defaults: base.yaml\na: {own}\nb: {own}\n")
    assert load_config(path) == {"a": yaml.safe_load(own), "b": yaml.safe_load(own)}


def test_a_file_read_again_is_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, base="a: {b: [1, 2]}\n")
    read_config(path, ["a.b=[4]"], resolve=False).values["a"]["c"] = 3
    read_config(path, resolve=False).values["a"]["b"].append(3)
    assert load_config(path) == {"a": {"b": [1, 2]}}
    assert load_config(write(tmp_path, base="a: 1\n")) == {"a": 1}, "what is known of a path is not kept"


def test_defaults_are_relative_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    write(tmp_path, base="x: 1\ny: 1\n")
    write(tmp_path / "inner", middle="defaults: ../base.yaml\ny: 2\n")
    path = write(tmp_path, top="defaults: inner/middle.yaml\nz: 3\n")
    monkeypatch.chdir(tmp_path / "inner")
    assert load_config(path) == {"x": 1, "y": 2, "z": 3}
    assert read_config(path).origins["x"] == f"{tmp_path}/base.yaml:1", "without .."
    (tmp_path / "inner" / "deep").mkdir()
    (tmp_path / "deep").symlink_to(tmp_path / "inner" / "deep")
    behind = write(tmp_path / "inner", top="defaults: ../deep/../middle.yaml\n")
    assert load_config(behind)["y"] == 2, "behind a link"


def test_shipped_files_are_inherited_from_anywhere(tmp_path: Path) -> None:
    path = write(tmp_path, top="defaults: examples/configs/base.yaml\nalgorithm: sft\n")
    assert read_config(path).values == read_config(loader.BASE).values | {"algorithm": "sft"}
    (tmp_path / "examples/configs").mkdir(parents=True)
    (tmp_path / "examples/configs/base.yaml").write_text("x: 1\n")
    assert load_config(path) == {"x": 1, "algorithm": "sft"}, "what lies beside a file comes first"


def test_two_parents_may_share_a_base(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        base="x: 0\n",
        left="defaults: base.yaml\nx: 1\n",
        right="defaults: base.yaml\ny: 2\n",
        top="defaults: [left.yaml, right.yaml]\n",
    )
    assert load_config(path) == {"x": 0, "y": 2}


def test_a_cycle_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, a="defaults: b.yaml\n", b="defaults: a.yaml\n")
    with pytest.raises(ConfigError, match=r"cycle: .*b\.yaml -> .*a\.yaml -> .*b\.yaml"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: nothere.yaml\n",
            r"nothere\.yaml \(included by .*top\.yaml\): cannot read the file: No such",
        ),
        ("defaults: nothere.yaml\n", r"No such file or directory\.$"),
        ("defaults: topp.yaml\n", r"No such file or directory\. Did you mean '.*/top\.yaml'\?"),
        (
            "defaults: examples/configs/grpo_tinny.yaml\n",
            r"No such file or directory\. Did you mean 'examples/configs/grpo_tiny\.yaml'\?",
        ),
        ("defaults: 'a.b=1'\n", r"No such file or directory\. Keys are set behind the file: FILE KEY=VALUE\.$"),
        ("defaults: 'lr=1.yaml'\n", r"No such file or directory\.$"),
        ("a:\n\tb: 1\n", r"top\.yaml:2: is indented with a tab, which YAML does not take\. Write blanks"),
        ("a:\n  b: 1\n\tc: 1\n", r"top\.yaml:3: is indented with a tab"),
        ("defaults: {a: b}\n", "give a file name or a list of file names"),
        ("defaults: .\n", "is a folder, and no plain file"),
        ("defaults: run\n", r"run \(included by .*\): is a folder, .* Did you mean '.*run/config\.yaml'\?"),
        ("a: 1\nb: [1, 2\nc: 3\n", r"top\.yaml:3: "),
        ("a: 1\na: 2\n", r"top\.yaml:2: found duplicate key a\. Take one of the two out"),
        ("a:1\nb: 2\n", r"top\.yaml:2: mapping values are not allowed in this context\. Usually .* blank after"),
        ("a:\n  b: 1\n  b: 2\n", r"top\.yaml:3: found duplicate key b"),
        ("- a\n- b\n", "must hold 'key: value' lines, not a list"),
        *((text, "must hold 'key: value' lines, not a single value") for text in ("hello\n", "3\n", "${a}\n")),
        ("a: 1\nnull: 3\n", r"top\.yaml:2: a key is null\. Give it a name, or write it in quotes"),
        ("?\n: 3\n", r"top\.yaml:1: a key is null"),
        ("a:\n  - b: 1\n    ~: 3\n", r"top\.yaml:3: a key is null"),
        ("a: ${b\n", "top.yaml"),
        ("a: ${b}\n", r"top\.yaml: a: is made of b, a key that is not there"),
        ("a: ???\nb: ${a}\n", r"top\.yaml: b: is made of a, a missing value\. Give one: a=\.\.\. \(.*top\.yaml:2\)"),
        ("a: x\nb: ['${mul:2,${a}}']\n", r'top\.yaml: b\.0: mul takes numbers, not "x" \(.*top\.yaml:2\)'),
        ("a: null\nb: ${add:2,${a}}\n", "b: add takes numbers, not null"),
        ("a: true\nb: ${add:2,${a}}\n", "b: add takes numbers, not true"),
        ("a: ${b}\nb: ${a}\n", r"a: is made of itself: a -> b -> a\. Give one of them a value\. \(.*top\.yaml:1\)"),
        ("a: ${a}\n", "a: is made of itself: a -> a"),
        ("a: {b: '${a}'}\n", r"a\.b: is made of itself: a\.b -> a\."),
        ("a: 1\nb: ${mul:${a},${c}}\nc: ['${b}', 2]\nd: ${mul:${e},2}\ne: ${d}\n", "d: is made of itself: d -> e -> d"),
        ("a: \x01\n", "top.yaml"),
        ("a: &x [*x]\n", r"top\.yaml:1: a value contains itself"),
        ("a: &x {b: *x}\n", r"top\.yaml:1: a value contains itself"),
        ("a: ${b}\nb: ['${a}']\n", "top.yaml"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, top=text))


def test_files_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "top.yaml")


@pytest.fixture
def sample(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    path = write(tmp_path, sample="a: {b: 1, c: [1, 2], d: null}\nname: x\nalias: ${name}\n")
    return lambda *overrides: load_config(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["a.b=2"], {"b": 2, "c": [1, 2], "d": None}),
        (["a.b=1e-4"], {"b": 1e-4, "c": [1, 2], "d": None}),
        (["a.b=true", "a.d=text"], {"b": True, "c": [1, 2], "d": "text"}),
        (["a.b='true'", "a.c=[]"], {"b": "true", "c": [], "d": None}),
        (["a.c=[3,x]"], {"b": 1, "c": [3, "x"], "d": None}),
        (["a={b:5}"], {"b": 5, "c": [1, 2], "d": None}),
        (["+a.e=1", "++a.b=3", "++a.f=4"], {"b": 3, "c": [1, 2], "d": None, "e": 1, "f": 4}),
        (["+a.e.f.g=1"], {"b": 1, "c": [1, 2], "d": None, "e": {"f": {"g": 1}}}),
        (["~a.b", "~a.d"], {"c": [1, 2]}),
        (["~a.b=1"], {"c": [1, 2], "d": None}),
        (["a.b=2", "a.b=3"], {"b": 3, "c": [1, 2], "d": None}),
    ],
)
def test_overrides(sample: Callable[..., dict[str, Any]], overrides: list[str], expected: object) -> None:
    assert sample(*overrides)["a"] == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.bb=1", r"override 'a\.bb=1': no key a\.bb to change\. Did you mean 'b'\?$"),
        ("nam.b=1", "no key nam to change. Did you mean 'name'?"),
        ("~a.x", r"no key a\.x to remove\.$"),
        ("name==3", r"^override 'name==3': one = is meant\. Write name=3$"),
        ("=3", "no key before the '='. Write key=value$"),
        ("+a.b=1", r"a\.b exists already. Leave the '\+' out"),
        ("~a.b=7", "a.b is 1, not 7"),
        ("a.b.c=1", "a.b is not a section"),
        ("+a.b.c=1", "a.b is not a section"),
        ("a.b=1,2", "sweeps are not supported"),
        ("a.b=choice(1,2)", "sweeps are not supported"),
        ("a@b=1", "'@' has no meaning"),
        ("a.b", r"^'a\.b' is no override\. Write a\.b=value, or ~a\.b to remove it\.$"),
        ("nme", r"^'nme' is no override\. Write name=value, or ~name to remove it\.$"),
        *(
            (value, rf"^'{value}' is no override\. Write a key and its value as one word: key=value\.$")
            for value in ("3", "-1", "1e-4", "0.5", "true", "null")
        ),
        ("else", r"^'else' is no override\. Write key=value, or ~key to remove one\.$"),
        ("~a[", r"^'~a\[' is no override\. Write key=value, or ~key to remove one\.$"),
        ("a.b=[1", r"not closed\. Write a\.b=\[1\]$"),
        ("other.yaml", r"A configuration file is given by --config \(run\), or as the one FILE \(check, plan\)\."),
        ("./configs/other.yml", "A configuration file is given by --config"),
        ("a.b=[core_attn", r"a bracket is not closed\. Write a\.b=\[core_attn\]$"),
        ("a.b=[{x: [1, 2}", r"Write key=value"),  # which no bracket at the end mends
        ("a.c=[1,2,]", r"a comma stands behind the last item\. Write 'a\.c=\[1,2\]'$"),
        ("a.c=[1,", r"a bracket is not closed\. Write a\.c=\[1\]$"),
        ("a.b = 3", r"blanks stand beside the =\. Write a\.b=3$"),
        ("a.c=[1 {]", r"Write key=value, \+key=value or ~key\.$"),
        ("a.b={x: [1, 2", r"Write a\.b=\{x: \[1, 2\]\}$"),
        ("name={question}", r"""characters in quotes: name='"\{question\}"'$"""),
        ("name=Q: {question} A:", r"""characters in quotes: name='"Q: \{question\} A:"'$"""),
        ("name=it's {x}", r"""characters in quotes: name='"it'"'"'s \{x\}"'$"""),
        ('name="{question', r"Write key=value, \+key=value or ~key\.$"),
    ],
)
def test_overrides_that_do_not_apply(sample: Callable[..., dict[str, Any]], override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(override)


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        (["a.c=[core_attn,", "attn_proj]"], "'a.c=[core_attn, attn_proj]'"),
        (["a.c=[{x:", "1},", "{y:", "2}]"], "'a.c=[{x: 1}, {y: 2}]'"),
        (["a.c=[the", "end,stop]"], "'a.c=[the end,stop]'"),
        (["a.c=[" + "x" * 210 + ",", "2]"], "all of it in quotes."),
        (["a.b", "=", "3"], "a.b=3"),
        (["a.b", "=3"], "a.b=3"),
        (["a.b=", "3"], "a.b=3"),
    ],
)
def test_words_that_a_shell_has_cut_are_told_as_one(
    sample: Callable[..., dict[str, Any]], words: list[str], whole: str
) -> None:
    """Each was a problem of its own, and the advice to close the bracket was refused as well."""
    for others in ([], ["name=y"]):
        with pytest.raises(ConfigError) as caught:
            sample(*words, *others)
        assert str(caught.value) == f"override '{shortened(words[0])}': it is cut at a blank. Write {whole}"
        with pytest.raises(ConfigError) as caught:
            sample(*others, *words, "nme=y")
        assert str(caught.value).splitlines()[1] == "override 'nme=y': no key nme to change. Did you mean 'name'?"


@pytest.mark.parametrize(
    "words", [["a.c=[1,", "name=y"], ["a.c=[1,", *["2,"] * 200], ["a.b=", "name=y"], ["a.b=2", "="]]
)
def test_words_that_make_nothing_together_stand_alone(sample: Callable[..., dict[str, Any]], words: list[str]) -> None:
    if words[0] == "a.b=":
        assert sample(*words)["name"] == "y"
    else:
        with pytest.raises(ConfigError) as caught:
            sample(*words)
        assert "cut at a blank" not in str(caught.value)


def test_a_section_that_is_empty_discards_nothing_unsaid(tmp_path: Path) -> None:
    """All inherited keys were gone, and the check found no problem."""
    base = "a: {b: {c: 1, d: 2}, e: 3}\nf: {}\ng: 1\n"
    top = write(tmp_path, base=base, top="defaults: base.yaml\na:\n  b:\n#   c: 5\nf:\ng:\nh:\n")
    with pytest.raises(ConfigError) as caught:
        load_config(top)
    assert str(caught.value) == (
        "a.b: is empty, and would discard the 2 key(s) that are inherited here. Leave the line out, or write null to "
        f"discard them. ({top}:3)"
    )
    heir = write(tmp_path, heir="defaults: top.yaml\ng: 2\n")
    with pytest.raises(ConfigError, match=r"^a\.b: is empty"):
        load_config(heir)
    top.write_text("defaults: base.yaml\na: {b: null}\nf: ~\ng:\n")
    assert load_config(top) == {"a": {"b": None, "e": 3}, "f": None, "g": None}


@pytest.mark.parametrize("name", ["default", "Defaults", "defualts", "DEFAULTS"])
def test_a_misspelt_inheritance_is_the_only_problem(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, base="a: 1\n", top=f"{name}: base.yaml\nbb: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}: {name}: unknown key. Did you mean 'defaults'? It names the file to inherit from."
    )


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("policy.foo=1", ""),
        ("policy.precison=bfloat16", " Did you mean 'precision'?"),
        ("policy.offload_modules=auto", " It belongs to policy.megatron_cfg."),
        ("polcy.precision=bfloat16", " Did you mean 'policy'?"),
        ("policy.megatron_cfg.model_overrides.num_layers=2", " To add a key, write +key=value"),
        ("policy.megatron_cfg.env_vars.NCCL_DEBUG=INFO", " To add a key, write +key=value"),
        ("~policy.megatron_cfg.model_overrides.num_layers", ""),
    ],
)
def test_a_key_can_be_added_only_where_the_schema_takes_it(tmp_path: Path, override: str, advice: str) -> None:
    text = "policy: {precision: float32, megatron_cfg: {model_overrides: {}, env_vars: {}}}\n"
    path = override.partition("=")[0].strip("~") if "polcy" not in override else "polcy"
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, top=text), [override])
    assert (
        str(caught.value)
        == f"override '{override}': no key {path} to {'remove' if override.startswith('~') else 'change'}.{advice}"
    )


def test_a_key_of_the_schema_that_no_file_gives_can_be_added(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no key policy.precision to change. To add a key, write \+key=value$"):
        load_config(write(tmp_path, top="policy: {}\n"), ["policy.precision=float32"])


def test_all_wrong_overrides_are_reported_together(sample: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ConfigError) as caught:
        sample("x=1", "a.b=2", "y=1")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "override 'x=1'",
        "override 'y=1'",
    ]


@given(override=st.text(st.sampled_from("ab.=+~[]{}(),:'\"$ 1?\\@/\n"), max_size=12))
@settings(max_examples=150, deadline=None)
def test_no_override_ends_in_another_error(tmp_path_factory: pytest.TempPathFactory, override: str) -> None:
    path = write(tmp_path_factory.getbasetemp(), fuzzed="a: {b: 1}\n")
    try:
        result = load_config(path, [override])
    except ConfigError:
        return
    assert isinstance(result, dict)
    assert all(isinstance(key, str) for key in result)


def test_the_quotes_that_an_override_is_told_to_have_mend_it(sample: Callable[..., dict[str, Any]]) -> None:
    assert sample('name="Q: {question} A:"')["name"] == "Q: {question} A:"


def test_an_interpolation_of_a_key_that_is_not_there_has_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, top="policy: {precision: x}\nb: ${policy.precison}\n")
    assert "not there. Did you mean 'policy.precision'? Name one" in read_config(path).unresolved["b"]


def test_interpolations_that_cannot_be_resolved_are_reported_together(tmp_path: Path) -> None:
    path = write(tmp_path, top="a: x\nb: ${c}\nd: ['${mul:${a},2}', 3]\ne: ${b}\nf: ${a}\n")
    loaded = read_config(path)
    assert loaded.values == {"a": "x", "b": "???", "d": ["???", 3], "e": "???", "f": "x"}
    assert loaded.unresolved == {
        "b": "is made of c, a key that is not there. Name one that is there, or write a value.",
        "d.0": 'mul takes numbers, not "x"',
        "e": "is made of b, a missing value. Give one: b=...",
    }
    assert loaded.references == {"b": ["c"], "d.0": ["a"], "e": ["b"], "f": ["a"]}
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["x=1"])
    assert len(str(caught.value).splitlines()) == 4


TEXTS = st.sampled_from(
    [
        *("${%s}", "x${%s}y", "\\${%s}", "${.%s}", "${..%s}", "${%s[0]}", "${${%s}}", "${%s", "${mul:${%s},2}"),
        *("${add:${%s},${n}}", "${max:${mul:${%s},2},${n}}", "${oc.select:%s,3}", "${oc.env:HOME}${%s}", "x"),
    ]
)
NAMES = st.sampled_from(["a", "b", "c", "c.0", "c.0.d", "d", "d.e", "d.f", "d.e.x", "n", "empty", "none.x", "none"])


@given(given=st.lists(st.builds(lambda text, name: text.replace("%s", name), TEXTS, NAMES), min_size=5, max_size=5))
@settings(max_examples=60, deadline=None)
def test_what_no_interpolation_names_changes_none(tmp_path_factory: pytest.TempPathFactory, given: list[str]) -> None:
    """OmegaConf gets a part of the file, and makes of it what it makes of the whole."""
    a, b, item, e, f = given
    values = {"a": a, "b": b, "c": [{"d": item}, 3], "d": {"e": e, "f": {"g": f, "h": 2}}, "n": 3, "none": None}
    path = write(tmp_path_factory.mktemp("part"), top=yaml.safe_dump({**values, "empty": {}, "d.e": 4, "": {"h": b}}))

    def outcome() -> object:
        try:
            found = read_config(path)
        except ConfigError as error:
            return str(error)
        return json.dumps(found.values), found.unresolved

    in_part = outcome()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loader, "_interpolated", lambda config: config)
        assert outcome() == in_part


def test_interpolations_see_overrides(sample: Callable[..., dict[str, Any]]) -> None:
    assert sample("name=y")["alias"] == "y"
    assert sample("a.b=${name}")["a"]["b"] == "x"


@pytest.mark.parametrize(
    ("text", "expected"), [("32GiB", 32 << 30), ("512MiB", 512 << 20), ("1.5 KiB", 1536), (" 2TiB ", 2 << 40)]
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "32", "32GB", "-1GiB", "GiB", "0GiB", "0.0MiB", "1e3MiB", "inf GiB"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "like"), [("72gib", "72GiB"), ("1.5 MIB", "1.5MiB"), ("80GB", "32GiB"), ("x", "32GiB")]
)
def test_a_size_in_other_letters_is_offered_in_the_right_ones(text: str, like: str) -> None:
    with pytest.raises(ConfigError, match=f"TiB, like {like}\\."):
        parse_bytes(text)


def test_relative_folders_are_looked_up_here_then_in_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, project = tmp_path / "here", tmp_path / "project"
    for folder in (here, project / "m"):
        folder.mkdir(parents=True)
    (project / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(here)
    monkeypatch.setattr(loader, "PROJECT_ROOT", project)
    assert resolve_model_path("m") == project / "m"
    (here / "m").mkdir()
    (here / "m" / "config.json").write_text("{}")
    assert resolve_model_path("m") == here / "m"
    assert resolve_model_path(str(project / "m")) == project / "m"


@pytest.mark.parametrize("resolve", [resolve_model_path, resolve_tokenizer_path, loader.resolve_data_path])
@pytest.mark.parametrize("name", ["", " "])
def test_no_name_is_not_the_current_folder(resolve: Callable[[str], Path], name: str) -> None:
    with pytest.raises(ConfigError, match=r"^is empty\. Give a local path\.$"):
        resolve(name)


def test_a_missing_folder_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        resolve_model_path("org/model")
    assert str(tmp_path / "org/model") in str(caught.value)
    assert str(loader.PROJECT_ROOT / "org/model") in str(caught.value)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        resolve_tokenizer_path(str(tmp_path))


def test_a_missing_path_names_what_is_called_almost_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "chat").mkdir(parents=True)
    (tmp_path / "data" / "chats.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\)\. Did you mean 'chats\.jsonl'\? Give a local path\.$"):
        loader.resolve_data_path("data/chatz.jsonl")
    with pytest.raises(ConfigError) as caught:
        resolve_model_path("data/chatt")
    assert "Did you mean" not in str(caught.value), "it is no model"
    (tmp_path / "data" / "chat" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"\)\. Did you mean 'chat'\? "):
        resolve_model_path("data/chatt")


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("+policy.new.inner=1", "policy.new"),
        ("+policy.new=1", "policy.new"),
        ("+policy.new={inner: 1}", "policy.new.inner"),
    ],
)
def test_what_an_override_adds_is_its_own(override: str, path: str) -> None:
    loaded = read_config(loader.PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [override])
    assert loaded.origin(path) == OVERRIDE
    assert loaded.origin("policy") != OVERRIDE


def test_a_folder_of_examples_may_be_called_otherwise(tmp_path: Path) -> None:
    base = tmp_path / "copy/modelopt/base.yaml"
    heir = tmp_path / "copy/configs/recipes/llm/heir.yaml"
    for path, text in {base: "seed: 7\n", heir: "defaults: ../../../../examples/modelopt/base.yaml\n"}.items():
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert load_config(heir, [])["seed"] == 7
    heir.write_text("defaults: ../../../../examples/modelopt/other.yaml\n")
    with pytest.raises(ConfigError, match="No such file"):
        load_config(heir, [])
