"""Reads JSON, YAML and text that somebody else wrote, in a time and memory that are known before.

A file of a model's folder, a configuration or a run's record can be anything: hundreds of megabytes, a pipe that never
ends, ten thousand levels deep, a number of five thousand digits, or aliases that double thirty times. Python's readers
take all of it and end late, with tracebacks, or not at all. So all of it has limits that no real file comes near:

- A file is a plain file, and its size is compared before it is read.
- JSON: brackets and commas are counted before they become objects, which are many times their text.
- YAML: its events are read first, which neither nest nor repeat what aliases name. Depth, duplicate keys and digits are
  seen there, and of each anchor how much it stands for, so that a bomb is known without setting it off.

Rejected: to catch what the readers raise. A bomb of aliases raises nothing, it fills the memory; and deep values that
can be read raise in whatever walks over them later. What is written twice is refused, for one of the two would count.

`tests/unit/specs/test_documents.py` keeps that nothing else in the package reads such files.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import yaml

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.plain_file import NotPlainError, open_plain_file
from nemo_rl_offload.units import MIB, human_bytes

CONFIG_BYTES = 1 * MIB
"""Of a configuration, or another file that people write."""
TEMPLATE_BYTES = 1 * MIB
MODEL_BYTES = 16 * MIB
"""Of a `config.json` and what is like it."""
INDEX_BYTES = 64 * MIB
"""Of the list of a model's weights. DeepSeek-V3's has 9 MB."""
TOKENIZER_BYTES = 128 * MIB
"""Gemma's has 33 MB."""
RUN_BYTES = 64 * MIB
"""Of what a run writes beside its checkpoints."""
LINE_BYTES = 32 * MIB
"""Of a record on a line."""
TOO_LONG_A_LINE = f"is longer than {human_bytes(LINE_BYTES)}"
MAX_DEPTH = 100
"""Levels of values within values."""
MAX_DIGITS = 100
"""Of an integer. Tokenizers have 31 for a length without limit."""
MAX_JSON_VALUES = 5_000_000
"""Brackets and commas. Gemma's tokenizer has two million."""
MAX_YAML_NODES = 10_000
"""Keys and values, aliases written out. `base.yaml` has 400."""
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBER = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|[-+0-9_:.eE]+)")
_TAGS_OF_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OCTAL = re.compile(r"[-+]?0[0-7_]*[0-7]")
_SEXAGESIMAL = re.compile(r"[-+]?([1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
_BINARY = re.compile(r"[-+]?0b[01_]+")
_SWITCH = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_DATA = (".jsonl", ".csv", ".parquet", ".arrow")
_USUAL_CAUSES = {
    "mapping values are not allowed in this context": (
        ". Usually a line above lacks the blank after its colon, a line is indented otherwise than those beside it, or "
        "text with a colon lacks quotes"
    )
}
"""And what to do, by what PyYAML says."""
TOO_DEEP = f"is nested over {MAX_DEPTH} levels deep"
TOO_MANY_DIGITS = f"has an integer of over {MAX_DIGITS} digits"
CONTAINS_ITSELF = "a value contains itself by an alias (*name)"


class DocumentError(ConfigError):
    """A file, or a text, that is not what its kind is. The message begins with the file, and the line where known."""

    def __init__(self, reason: str, path: Path | None = None, line: int | None = None) -> None:
        self.reason, self.line = reason, line
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + reason)


def open_plain(path: Path, *, follows_links: bool = True) -> BufferedReader:
    """Open a file for reading, but no pipe and no device, which may never end. Raises OSError, DocumentError.

    In a run directory a link at the file's name is not followed: it may have come with an archive.
    """
    try:
        return open(open_plain_file(path, follows_links=follows_links), "rb")
    except NotPlainError as error:
        raise DocumentError(error.what.removeprefix("it "), path) from error


def read_bytes(path: Path, limit_bytes: int, *, follows_links: bool = True) -> bytes:
    """Read a plain file of at most so many bytes. Raises OSError, DocumentError."""
    with open_plain(path, follows_links=follows_links) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes <= limit_bytes:  # no more is read where it grows meanwhile
            return file.read(size_bytes)
        raise DocumentError(
            f"has {human_bytes(size_bytes)}, and such a file has at most {human_bytes(limit_bytes)}", path
        )


def read_text(path: Path, limit_bytes: int, *, follows_links: bool = True) -> str:
    """Read UTF-8 text. Raises OSError, DocumentError."""
    try:
        return read_bytes(path, limit_bytes, follows_links=follows_links).decode()
    except UnicodeDecodeError as error:
        raise DocumentError("is not UTF-8 text", path) from error


def read_json(path: Path, limit_bytes: int, *, follows_links: bool = True) -> Any:
    """Read a JSON document. Raises OSError, DocumentError."""
    text = read_text(path, limit_bytes, follows_links=follows_links)
    try:
        return parse_json(text)
    except DocumentError as error:
        raise DocumentError(error.reason, path, error.line) from error


def read_json_object(path: Path, limit_bytes: int) -> dict[str, Any]:
    """Read a JSON document that is an object with keys. Raises OSError, DocumentError."""
    content = read_json(path, limit_bytes)
    if not isinstance(content, dict):
        raise DocumentError(f"holds {kind_of(content)}, and must hold an object with keys", path)
    return content


def bounded_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield a file's lines; of one that is longer than `LINE_BYTES` None, without reading it as a whole."""
    while line := file.readline(LINE_BYTES + 1):
        is_too_long = len(line) > LINE_BYTES and not line.endswith(b"\n")
        yield None if is_too_long else line
        while is_too_long and (rest := file.readline(LINE_BYTES)):
            is_too_long = not rest.endswith(b"\n")


def parse_json(text: str, *, max_values: int = MAX_JSON_VALUES) -> Any:
    """Return what JSON says. Raises DocumentError, without a path."""
    if text.startswith("\ufeff"):
        raise DocumentError("begins with a byte order mark. Save it as UTF-8 without one")
    if not text.strip():
        raise DocumentError("is empty", line=1)
    if text.count(",") + text.count("[") + text.count("{") > max_values:
        raise DocumentError(f"has over {max_values} values")
    try:
        content = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise DocumentError(f"is not JSON: {error.msg} at column {error.colno}", line=error.lineno) from error
    except RecursionError as error:
        raise DocumentError(TOO_DEEP) from error
    if is_too_deep(content):
        raise DocumentError(TOO_DEEP)
    return content


def is_too_deep(content: object) -> bool:
    """Whether a value has more than `MAX_DEPTH` levels, told without recursion."""
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DocumentError(f"has the key {json.dumps(key)} twice in one object")
    return content


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise DocumentError(TOO_MANY_DIGITS)
    return int(digits)


def kind_of(content: object) -> str:
    """What a document holds, for a message."""
    if content is None:
        return "null"
    return "a list" if isinstance(content, list) else "a mapping" if isinstance(content, Mapping) else "a single value"


def read_yaml(path: Path, limit_bytes: int = CONFIG_BYTES, *, follows_links: bool = True) -> Any:
    """Read a YAML document of plain values. Raises OSError, DocumentError."""
    text = read_text(path, limit_bytes, follows_links=follows_links)
    check_yaml(text, path)
    try:
        return yaml.load(text, Loader=YAML_LOADER)  # noqa: S506 - a safe one
    except (yaml.YAMLError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise as_document_error(error, path) from error


def check_yaml(text: str, path: Path) -> None:
    """Raise DocumentError where text is no YAML, or YAML that should not be loaded."""
    try:
        _Events(path).read(text)
    except yaml.YAMLError as error:
        raise as_document_error(error, path, text) from error


def as_document_error(error: Exception, path: Path, text: str = "") -> DocumentError:
    """What a YAML loader raised of a text, for a user: values that are not what their tags say raise whatever Python
    does."""
    if isinstance(error, DocumentError):
        return error
    if isinstance(error, yaml.MarkedYAMLError):
        line = error.problem_mark.line + 1 if error.problem_mark else None
        if line is not None and _is_indented_by_tab(text, line):
            return DocumentError("is indented with a tab, which YAML does not take. Write blanks", path, line)
        problem = str(error.problem or error.context)
        if path.suffix in _DATA:
            return DocumentError(
                f"is no YAML ({problem}): {path.suffix} is of data, not of a configuration", path, line
            )
        return DocumentError(f"{problem}{_USUAL_CAUSES.get(problem, '')}", path, line)
    if isinstance(error, yaml.reader.ReaderError):
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return DocumentError(f"has the character U+{code:04X}, which YAML does not take", path)
    return DocumentError(f"a value is not what its tag says: {str(error).splitlines()[0][:200]}", path)


def _is_indented_by_tab(text: str, line: int) -> bool:
    lines = text.splitlines()
    return line <= len(lines) and "\t" in lines[line - 1][: -len(lines[line - 1].lstrip()) or None]


def _two_ways(text: str) -> str:
    """How to write a value that this loader, of YAML 1.1, reads otherwise than YAML 1.2; "" for any other."""
    if _OCTAL.fullmatch(text):
        octal, decimal = (int(text.replace("_", ""), base) for base in (8, 10))
        if octal != decimal:
            return f"{text} is {octal} in YAML 1.1 and {decimal} in YAML 1.2. Write {decimal}"
    if _SEXAGESIMAL.fullmatch(text) or _BINARY.fullmatch(text):
        number = yaml.safe_load(text)
        return f'{text} is {number} in YAML 1.1 and text in YAML 1.2. Write {number}, or "{text}"'
    if _SWITCH.fullmatch(text):
        word = str(yaml.safe_load(text)).lower()
        return f'{text} is {word} in YAML 1.1 and text in YAML 1.2. Write {word}, or "{text}"'
    return ""


class _Level:
    """A mapping or list that is being read."""

    def __init__(self, anchor: str | None, *, is_mapping: bool) -> None:
        self.anchor = anchor
        self.is_mapping = is_mapping
        self.num_nodes = 1
        """Aliases written out."""
        self.height = 1
        self.num_children = 0
        self.keys: set[str] = set()


class _Events:
    """One look over a document's events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._levels: list[_Level] = []
        self._anchors: dict[str, tuple[int, int] | None] = {}
        """Number of nodes and height of what an anchor names; None while that is being read."""

    def read(self, text: str) -> None:
        num_documents = 0
        for event in yaml.parse(text, Loader=YAML_LOADER):
            line = 1 if event.start_mark is None else event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    self._refuse("a second document begins here. Give one", line)
            elif isinstance(event, yaml.CollectionStartEvent):
                if event.anchor is not None:
                    self._anchors[event.anchor] = None
                self._levels.append(_Level(event.anchor, is_mapping=isinstance(event, yaml.MappingStartEvent)))
                if len(self._levels) > MAX_DEPTH:
                    self._refuse(TOO_DEEP, line)
            elif isinstance(event, yaml.CollectionEndEvent):
                ended = self._levels.pop()
                self._add(ended.anchor, ended.num_nodes, ended.height, line)
            elif isinstance(event, yaml.ScalarEvent):
                self._scalar(event, line)
            elif isinstance(event, yaml.AliasEvent) and event.anchor in self._anchors:  # else the loader says it
                named = self._anchors[event.anchor]
                if named is None:
                    self._refuse(CONTAINS_ITSELF, line)
                self._add(None, *named, line)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        is_number = event.implicit[0] or event.tag in _TAGS_OF_NUMBERS
        if len(event.value) > MAX_DIGITS and is_number and _NUMBER.fullmatch(event.value):
            self._refuse(TOO_MANY_DIGITS, line)
        is_key = bool(self._levels) and self._levels[-1].is_mapping and self._levels[-1].num_children % 2 == 0
        if event.implicit[0] and not is_key and (how := _two_ways(event.value)):
            self._refuse(how, line)
        if is_key:
            is_merge = event.implicit[0] and event.value == "<<"
            if event.value in self._levels[-1].keys and not is_merge:
                self._refuse(f"found duplicate key {event.value[:100]}. Take one of the two out", line)
            self._levels[-1].keys.add(event.value)
        self._add(event.anchor, 1, 0, line)

    def _add(self, anchor: str | None, num_nodes: int, height: int, line: int) -> None:
        """Take a whole value into the one around it."""
        if anchor is not None:
            self._anchors[anchor] = (num_nodes, height)
        if not self._levels:
            return
        around = self._levels[-1]
        around.num_children += 1
        around.num_nodes += num_nodes
        around.height = max(around.height, height + 1)
        if around.num_nodes > MAX_YAML_NODES:
            self._refuse(f"has over {MAX_YAML_NODES} values, what aliases (*name) stand for included", line)
        if len(self._levels) + around.height - 1 > MAX_DEPTH:
            self._refuse(TOO_DEEP, line)

    def _refuse(self, reason: str, line: int) -> NoReturn:
        raise DocumentError(reason, self._path, line)
