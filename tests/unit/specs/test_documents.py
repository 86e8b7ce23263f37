"""Limits of documents, and that everything in the package that reads users' files keeps them."""

import ast
import os
from pathlib import Path

import pytest
from patience import within_patience

from nemo_rl_offload.config.loader import load_config, read_config
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs import documents
from nemo_rl_offload.specs.documents import DocumentError, bounded_lines, parse_json, read_json, read_text, read_yaml

PACKAGE = Path(__file__).resolve().parents[3] / "nemo_rl_offload"
READERS = {
    "json.load",
    "json.loads",
    "yaml.load",
    "yaml.safe_load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.compose",
}
MAY_READ = {
    "specs/documents.py",
    "config/loader.py",  # OmegaConf's, behind check_yaml
    "config/sources.py",  # behind check_yaml
    "config/rules/turns.py",  # what it has written itself
    "environments/process.py",  # its own process's answers
    *("environments/nemo_gym/process.py", "environments/nemo_gym/child.py"),  # what one writes for the other
    "environments/code_calls.py",  # in processes without rights, with limits of memory and time
    "environments/code_child.py",  # what its parent has written
}


def calls(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@pytest.mark.slow
def test_nothing_else_reads_documents() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if calls(path) & READERS}
    found |= {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.endswith(".validate_json") or name == "OmegaConf.load" for name in calls(path))
    }
    assert "specs/documents.py" in found, "the names of the readers"
    assert found <= MAY_READ


def write(folder: Path, content: bytes) -> Path:
    path = folder / "it"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1: is empty"),
        (b'{"a": 1', ":1: is not JSON: Expecting ',' delimiter at column 8"),
        (b'{\n"a": 01}', ":2: is not JSON"),
        (b"[" * 100_000, ": is nested over 100 levels deep"),
        (b"[" * 101 + b"]" * 101, ": is nested over 100 levels deep"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, ": is nested over 100 levels deep"),
        (b"[" + b"1" * 101 + b"]", ": has an integer of over 100 digits"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', ': has the key "b" twice in one object'),
        (b"\xff", ": is not UTF-8 text"),
        (b"\xef\xbb\xbf{}", ": begins with a byte order mark"),
        (b"[" + b"0," * 5_000_000 + b"0]", ": has over 5000000 values"),
    ],
    ids=range(11),
)
def test_json_that_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DocumentError) as caught:
        read_json(path, 1 << 24)
    assert str(caught.value).startswith(f"{path}{message}")


def test_json_at_the_limits_is_read() -> None:
    assert parse_json("1" * 100) == int("1" * 100)
    assert parse_json("[" * 100 + "]" * 100)
    assert parse_json('{"model_max_length": 1000000000000000019884624838656, "a": -0.5e3, "b": Infinity}')


def test_a_file_is_plain_and_its_size_is_known_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, b"x" * 100)
    assert read_text(path, 100) == "x" * 100
    with pytest.raises(DocumentError, match=r"it: has 100 B, and such a file has at most 99 B"):
        read_text(path, 99)
    os.truncate(path, 1 << 40)
    with pytest.raises(DocumentError, match=r"has 1\.00 TiB"):
        read_text(path, 1 << 20)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(DocumentError, match="no plain file"):
            read_text(other, 99)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", ":2: "),
        ("a: " + "[" * 200, ":1: is nested over 100 levels deep"),
        ("\n".join(" " * depth + "a:" for depth in range(200)), ":101: is nested over 100 levels deep"),
        ("".join(f"k{n}: &k{n} [{f'*k{n - 1}' if n else 1}]\n" for n in range(150)), ":100: is nested over 100 levels"),
        (
            "k0: &k0 [b]\n" + "".join(f"k{n}: &k{n} [{f'*k{n - 1},' * 3}]\n" for n in range(1, 20)),
            ":9: has over 10000 values",
        ),
        (
            "k0: &k0 {b: 1}\n" + "".join(f"k{n}: &k{n} {{<<: [{f'*k{n - 1},' * 3}]}}\n" for n in range(1, 20)),
            ":8: has over 10000 values",
        ),
        ("a: &a [[*a]]", ":1: a value contains itself by an alias (*name)"),
        ("a: 1\nb: " + "1" * 101, ":2: has an integer of over 100 digits"),
        ("a: 0x" + "1" * 101, ":1: has an integer of over 100 digits"),
        ("a: " + "1:" * 100 + "1", ":1: has an integer of over 100 digits"),
        (f"a: !!int '{'1' * 101}'", ":1: has an integer of over 100 digits"),
        ("a: 1\nb: {c: 1, 'c': 2}", ":2: found duplicate key c"),
        ("1: a\n1: b", ":2: found duplicate key 1"),
        ("a: \0", ": has the character U+0000, which YAML does not take"),
        ("a: !!int x", ": a value is not what its tag says"),
        ("a: !!bool x", ": a value is not what its tag says"),
        ("a: !!python/object/apply:os.system [id]", ":1: could not determine a constructor for the tag"),
        ("a: 1\n---\nb: 1", ":2: a second document begins here"),
    ],
    ids=range(18),
)
def test_yaml_that_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text.encode())
    with within_patience(), pytest.raises(DocumentError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}{message}")
    with within_patience(), pytest.raises(ConfigError):
        load_config(path)


def test_yaml_within_the_limits_is_read(tmp_path: Path) -> None:
    text = f"a: &a {{b: [1, 2]}}\nc: *a\nd: {{<<: *a, e: '{'1' * 5000}'}}\nf: {'ab' * 200}\ng: ['{'x' * 100000}']\n"
    read = read_yaml(write(tmp_path, text.encode()))
    assert (read["c"], read["d"]["b"], read["d"]["e"]) == ({"b": [1, 2]}, [1, 2], "1" * 5000)
    assert load_config(tmp_path / "it") == read
    (tmp_path / "it").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load_config(tmp_path / "it") == {"a": 1}


def test_lines_that_are_too_long_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LINE_BYTES", 4)
    for end in (b"\n", b""):
        with write(tmp_path, b"abcd\nabcde\n\nabcdefghijklmnop\nab" + end).open("rb") as file:
            assert list(bounded_lines(file)) == [b"abcd\n", None, b"\n", None, b"ab" + end]


def doubled(value: str, depth: int) -> str:
    return "k0: 1\n" + "".join(f"k{n}: {value.replace('K', f'k{n - 1}')}\n" for n in range(1, depth))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_data_in_the_place_of_a_configuration(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"chats{suffix}"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(DocumentError, match=rf"chats\{suffix}:2: is no YAML .* \{suffix} is of data, not of a config"):
        read_yaml(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (doubled("'${K} ${K}'", 40), "interpolations .* name one another too often"),
        (doubled("{x: '${K}', y: '${K}'}", 40), "interpolations .* name one another too often"),
        (doubled("${add:${K},${K}}", 40), "interpolations .* name one another too often"),
        (doubled("${K}", 500), "interpolations .* name one another too often"),
        (f"a: {'x' * 60_000}\nb: '{'${a}' * 50}'\n", "interpolations .* name one another too often"),
        (f"a: {'${' * 3000}\n", ":1: has too many interpolations"),
        (f"a: 1\nb: ['{'${a}' * 201}']\n", ":2: has too many interpolations"),
        ("defaults: [" + "it," * 3 + "it]\n", "defaults form a cycle"),
        ("defaults: [" + "examples/configs/base.yaml, " * 101 + "]\n", "defaults name over 100 files"),
        ('defaults: "a\\0b"\n', "has a null character, which no file's name has"),
    ],
    ids=range(10),
)
def test_configurations_that_grow_without_bounds(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text.encode())
    with within_patience(), pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path)) or "cycle" in message
    assert load_config(write(tmp_path, b"a: 1\nb: '${a}'\n")) == {"a": 1, "b": 1}, "OmegaConf is as it was"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"a={'1' * 5000}", "has an integer of over 100 digits"),
        (f"a=[{'1' * 150}]", "has an integer of over 100 digits"),
        (f"a={'[' * 400}{']' * 400}", "is nested over 100 levels deep"),
        (f"a={'[' * 50_000}", "is too long"),
        (f"a=[{'1,' * 20_000}1]", "is too long"),
        (f"a={'x' * 200_000}", "is too long"),
    ],
    ids=range(6),
)
def test_overrides_out_of_all_bounds(override: str, message: str, tmp_path: Path) -> None:
    problems = read_config(write(tmp_path, b"a: 1\n"), [override]).problems
    assert len(problems) == 1
    assert problems[0].endswith(message) or message in problems[0]
    assert len(problems[0]) < 500


def test_a_long_text_in_quotes_may_have_anything(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m['role'] }}, [(" * 300
    quoted = text.replace("'", "\\'")
    assert read_config(write(tmp_path, b"a: 1\n"), [f"a='{quoted}'"]).values == {"a": text}


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("010", "010 is 8 in YAML 1.1 and 10 in YAML 1.2. Write 10"),
        ("-011", "-011 is -9 in YAML 1.1 and -11 in YAML 1.2. Write -11"),
        ("0:30.5", "0:30.5 is 30.5 in YAML 1.1 and text in YAML 1.2"),
        ("0b101", "0b101 is 5 in YAML 1.1 and text in YAML 1.2"),
        ("1:30", '1:30 is 90 in YAML 1.1 and text in YAML 1.2. Write 90, or "1:30"'),
        ("10:00:00:00", 'Write 2160000, or "10:00:00:00"'),
        ("yes", 'yes is true in YAML 1.1 and text in YAML 1.2. Write true, or "yes"'),
        ("Off", 'Write false, or "Off"'),
        ("no", 'Write false, or "no"'),
    ],
)
@pytest.mark.parametrize("form", ["a: 1\nb: {}", "a: 1\nb: [{}]", "a: 1\nb: {{c: {}}}"])
def test_a_value_that_means_two_things_is_refused(tmp_path: Path, form: str, text: str, how: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(form.format(text))
    with pytest.raises(DocumentError) as error:
        read_yaml(file)
    assert str(error.value).startswith(f"{file}:2: ")
    assert how in str(error.value)
    file.write_text(form.format(f'"{text}"'))
    assert text in str(read_yaml(file))


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "10",
        "0.5",
        "00.5",
        "1e-5",
        "0x1F",
        "true",
        "null",
        "00:03:45:00",
        "00",
        "-007",
        "a:30",
        "1:75",
        "nope",
        "08",
    ],
)
def test_a_value_that_means_one_thing_is_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"yes: {text}")
    assert len(read_yaml(file)) == 1
