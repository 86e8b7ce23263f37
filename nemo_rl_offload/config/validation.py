"""Everything that is wrong with a configuration, said at once and before anything starts.

First the schema is checked by pydantic, whose errors are worded anew: path, what was given, what is allowed,
the nearest name. Then come the rules of `rules/` that join several keys. A rule reads values by their path;
where a value is missing or of the wrong type, and so reported already, the rule ends and the others go on. Every
problem ends with the place where the value was written, if the configuration was read from files.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, is_typeddict

from pydantic import TypeAdapter, ValidationError

from nemo_rl_offload.config.full_schema import full_schema
from nemo_rl_offload.config.nemo_rl.translation import unknown_key
from nemo_rl_offload.config.rules.registry import RULES, RULES_OF_THIS_MACHINE, WARNINGS
from nemo_rl_offload.config.rules.rule import MEGATRON, Get, ReportedError, Rule
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.sources import OVERRIDE, UNGIVEN, LoadedConfig, nodes
from nemo_rl_offload.config.types import defaults_of, describe, item_type, keys_of
from nemo_rl_offload.errors import ConfigError, nearest

LEFT_OUT, MISSING = "missing", "missing value"
"""How a problem begins where a key is not there, and where a value has to be given."""
NOT_ALLOWED = "is not allowed"
_OTHER_KEY = re.compile(r"\$\{([\w.]+)\}")
_NOR_HAVE = re.compile(r", nor have ([\w., ]+?) (?:while|with)\b")
_SAYS_NO_EFFECT = re.compile(r" (has|have|of) no effect\b|: ignored\b")


@dataclass(frozen=True)
class CheckedConfig:
    """A configuration that can be run, and what its author should know about it."""

    config: MasterConfig
    warnings: list[str]


@dataclass(frozen=True)
class Problem:
    """Something to change, or to know."""

    path: str
    """Path of the key; "" where it is about an override that does not apply."""
    message: str
    origin: str
    """Where the value was written: ``"file:line"``, an override, or "" where that is not known."""

    def __str__(self) -> str:
        return (f"{self.path}: " if self.path else "") + self.message + (f" ({self.origin})" if self.origin else "")


@dataclass(frozen=True)
class Findings:
    """All that is to be said about a configuration."""

    config: MasterConfig | None
    """The configuration; None where there are problems."""
    problems: list[Problem]
    warnings: list[Problem]
    loaded: LoadedConfig
    """What was examined."""
    without_effect: list[Problem]
    """Keys of a recipe of NeMo-RL that have no effect here, and why."""

    @property
    def summed_up(self) -> list[str]:
        """The warnings as lines, with one line for all keys without effect, and one for those of a recipe."""
        effectless = [warning for warning in self.warnings if _SAYS_NO_EFFECT.search(str(warning))]
        grouped = effectless if len(effectless) > 1 else []
        lines = [str(warning) for warning in self.warnings if warning not in grouped]
        if grouped:
            keys = [key for warning in grouped for key in [warning.path, *_others_in(warning.message)]]
            keys = list(dict.fromkeys(keys))
            lines.append(f"{len(keys)} keys have no effect: {', '.join(keys)}. `check --verbose` says why.")
        if num := len(self.without_effect):
            what = "1 key has" if num == 1 else f"{num} keys have"
            lines.append(f"{what} no effect here, in a recipe of NeMo-RL; `check --verbose` names them, and says why.")
        return lines


def _others_in(message: str) -> list[str]:
    """The keys that a warning names besides its first."""
    found = _NOR_HAVE.search(message)
    return found[1].split(", ") if found else []


def check_config(
    raw: Mapping[str, Any] | LoadedConfig, source: str = "configuration", *, run_here: bool = True
) -> CheckedConfig:
    """Check a configuration for `run`; ``source`` is the file name that errors begin with. See `examine`.

    Raises one ConfigError with all problems, one per line, each beginning with the key's path.
    """
    found = examine(raw, run_here=run_here)
    if found.config is None:
        raise refusal(source, found.problems)
    return CheckedConfig(found.config, found.summed_up)


def refusal(source: str, problems: Sequence[Problem]) -> ConfigError:
    """All problems as one error, which also has them one by one."""
    error = ConfigError(summary(source, problems))
    error.problems = [asdict(problem) for problem in problems]
    return error


def summary(source: str, problems: Sequence[Problem]) -> str:
    """How many problems there are, and each on its own line."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{source}: {count}", *map(str, problems)])


def examine(raw: Mapping[str, Any] | LoadedConfig, *, run_here: bool) -> Findings:
    """Find everything that is wrong with a configuration.

    What a run needs on this machine, such as the model's folder, is a problem with ``run_here`` and else a warning.
    In a recipe of NeMo-RL, whose files carry whole sections that others read, what has no effect is one warning.
    """
    loaded = raw if isinstance(raw, LoadedConfig) else LoadedConfig({**raw})
    config, reported = _against_schema(loaded.values, loaded.unresolved)
    get = _Reader(loaded.values, [*reported, *loaded.refused], frozenset() if loaded.is_recipe else loaded.inherited)
    lines = [f"{path}: {text}" for path, text in (_causes(reported, loaded) | {**loaded.refused}).items()]
    lines += [line for rule in RULES for line in _run(rule, get)]
    lines = [line for line in lines if not (_is_lacking_for(line, loaded.refused) or _is_section_of(line, lines))]
    here = [line for rule in RULES_OF_THIS_MACHINE for line in _run(rule, get) if line not in lines]
    lines += here if run_here else []
    problems = [Problem("", text, "") for text in loaded.problems] + [problem_at(line, loaded) for line in lines]
    lines = [f"{line} Only a run needs it." for line in here if not run_here]
    lines += [*loaded.notes, *_letters_for_breaks(loaded), *(line for rule in WARNINGS for line in _run(rule, get))]
    lines = [line for line in lines if not (_SAYS_NO_EFFECT.search(line) and line.partition(":")[0] in get.inherited)]
    effectless = [line for line in lines if loaded.is_recipe and _SAYS_NO_EFFECT.search(line)]
    warnings = [problem_at(line, loaded) for line in lines if line not in effectless]
    effectless += [f"{path}: {reason}" for path, reason in loaded.without_effect.items()]
    ordered = [problem_at(line, loaded) for line in sorted(effectless)]
    return Findings(None if problems else config, problems, warnings, loaded, ordered)


_TEXTS = ("data.prompt_template", "policy.generation.stop_strings")


def _letters_for_breaks(loaded: LoadedConfig) -> Iterator[str]:
    """Overrides, and texts for a model, in which somebody may have meant a line break: only double quotes in YAML, and
    no quotes of an override, make one of these letters."""
    for path, value in nodes(loaded.values):
        if (
            isinstance(value, str)
            and r"\n" in value
            and (loaded.origins.get(path) == OVERRIDE or path.startswith(_TEXTS))
        ):
            yield (
                rf"{path}: has \n, two letters and no line break. For one, write $'...' around the override in a "
                "shell, or double quotes in YAML."
            )


_OF_PROBLEMS = ("data.", "env.")
_NO_SUCH_VALUE = ("missing value", '"Environment variable')


def _is_lacking_for(line: str, refused: Mapping[str, str]) -> bool:
    """Whether a line says that a value is missing which another one would give that is refused."""
    path, _, text = line.partition(": ")
    if not text.startswith(_NO_SUCH_VALUE):
        return False
    if path.startswith("teacher."):
        return any("cross-tokenizer distillation" in why for why in refused.values())
    return path.startswith(_OF_PROBLEMS) and any(each.startswith(_OF_PROBLEMS) for each in refused)


def _is_section_of(line: str, lines: Sequence[str]) -> bool:
    """Whether a section is unknown because no environment has its name, which another line says where it is chosen."""
    unknown = re.match(r"env\.([^.:]+): unknown key", line)
    return unknown is not None and any(
        re.match(rf'data\.\S*env_name: "{re.escape(unknown[1])}" ', each) for each in lines
    )


def problem_at(line: str, loaded: LoadedConfig) -> Problem:
    """Take a line apart that begins with a path, and add the place of that path."""
    path, _, message = line.partition(": ")
    return Problem(path, message, loaded.origin(path))


def _causes(reported: Mapping[str, str], loaded: LoadedConfig) -> dict[str, str]:
    """What is wrong, without the values that are wrong because they are made of another one that is."""
    causes = dict(reported)
    for path, text in reported.items():
        others = causes.keys() - {path}
        sources = loaded.references.get(path, ()) if path in loaded.unresolved or NOT_ALLOWED in text else ()
        if any(other == source or source.startswith(f"{other}.") for source in sources for other in others):
            del causes[path]
    return causes


def _against_schema(
    values: Mapping[str, Any], unresolved: Mapping[str, str]
) -> tuple[MasterConfig | None, dict[str, str]]:
    """Return the configuration with its values' types, if they are right, and what is wrong, by path."""
    reported = _missing_values(values) | {**unresolved}
    try:
        return _adapter().validate_python(values), reported
    except ValidationError as error:
        return None, _schema_problems(values, error) | reported


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of another version with the keys of this one: absent ones have their defaults.

    A default may be the value of another key; one that is made of several is not known here, and its key stays absent.
    """
    defaults = defaults_of(full_schema())
    found: dict[str, Any] = _completed(
        values, full_schema(), defaults, {**dict(nodes(defaults)), **dict(nodes(values))}
    )
    return found


def _completed(values: Any, section: Any, defaults: Any, given: Mapping[str, Any]) -> Any:
    if not (isinstance(values, Mapping) and is_typeddict(section)):
        return values

    def value_of(key: str, inner: Any) -> Any:
        default = defaults.get(key)
        if key in values or is_typeddict(inner):
            return _completed(values.get(key, {}), inner, default, given)
        other = _OTHER_KEY.fullmatch(str(default))
        return given.get(other[1], default) if other else default

    found = {key: value_of(key, inner) for key, inner in keys_of(section).items() if key in values or key in defaults}
    return {key: value for key, value in found.items() if key in values or "${" not in str(value)}


def schema_problems(values: Mapping[str, Any]) -> dict[str, str]:
    """What the schema says is wrong with a configuration, by path; no rule is asked."""
    return _against_schema(values, {})[1]


PLANNED = ("policy", "cluster", "loss_fn", "algorithm", "teacher", "defaults", "")
"""Sections that a plan reads, the files that they come from, and overrides that do not apply."""
NOT_PLANNED = f"{MEGATRON}.activation_offload.gpu_memory_budget"
"""What `auto` cannot be without, and a plan is told otherwise."""


def check_to_plan(raw: Mapping[str, Any] | LoadedConfig, source: str) -> None:
    """Check what a plan needs of a configuration, as `examine` does.

    Raises one ConfigError with all problems below `PLANNED`.
    """
    problems = [
        problem
        for problem in examine(raw, run_here=False).problems
        if problem.path.split(".")[0] in PLANNED and (problem.path != NOT_PLANNED or "needs it" not in problem.message)
    ]
    if problems:
        raise ConfigError("\n".join([f"{source}: cannot be planned", *map(str, problems)]))


@cache
def _adapter() -> TypeAdapter[MasterConfig]:
    return TypeAdapter(full_schema())


def _missing_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the paths that hold OmegaConf's mark for a value that must be given."""
    marked = [path for path, value in nodes(values) if value == UNGIVEN]
    return {path: f"{MISSING}. Give one: {path}=..." for path in marked}


def _schema_problems(raw: Mapping[str, Any], error: ValidationError) -> dict[str, str]:
    problems = {}
    for details in error.errors(include_url=False, include_context=False):
        location = details["loc"]
        if location[-1] == "[key]" and details["type"].startswith("int"):
            problems[_dotted(location[:-1])] = "is no key here. Allowed: whole numbers."
            continue
        if details["type"] in ("extra_forbidden", "invalid_key") or location[-1] == "[key]":
            location = tuple(part for part in location if part != "[key]")
            problems[_dotted(location)] = unknown_key(_dotted(location), raw.get("algorithm"))
            continue
        keys, annotation, value = _locate(raw, location)
        path = _dotted(keys)
        given = LEFT_OUT if details["type"] == "missing" else f"{_shown(value)} {NOT_ALLOWED}"
        problems[path] = f"{given}. Allowed: {describe(annotation)}.{_hint(path, annotation, value)}"
    inner = [path for path in problems if any(other.startswith(f"{path}.") for other in problems)]
    return {path: text for path, text in problems.items() if path not in inner}


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(map(str, location))


def _locate(raw: Any, location: Iterable[int | str]) -> tuple[list[int | str], Any, Any]:
    """Follow a location in the data and in the schema; return path, annotation and value.

    Pydantic puts a tag for the member of a union into the location: one for a list stands before the item's number,
    others end the walk.
    """
    path: list[int | str] = []
    annotation: Any = full_schema()
    for part in location:
        is_key = isinstance(raw, Mapping) and (part in raw or part in keys_of(annotation))
        is_item = isinstance(raw, list) and isinstance(part, int)
        if str(part).startswith("list["):
            continue
        if not (is_key or is_item):
            break
        path.append(part)
        inner = item_type(annotation, dict if is_key else list)
        annotation = keys_of(annotation).get(str(part), inner) if is_key else inner
        raw = raw.get(part) if is_key else raw[part]
    return path, annotation, raw


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _hint(path: str, annotation: Any, value: Any) -> str:
    """The list form for text where a list is needed, the nearest of the allowed names, or how a mapping is emptied."""
    if value is None and describe(annotation).startswith("a mapping"):
        return f" For an empty one: ~{path}. In a file that inherits it: {{_override_: true}}."
    if not isinstance(value, str):
        return ""
    allowed = describe(annotation)
    if hint := nearest(value, re.findall(r"'([^']+)'", allowed)):
        return hint
    return f" Write it as a list: [{', '.join(re.findall(r'[^\s,]+', value))}]" if "a list of text" in allowed else ""


class _Reader:
    """Reads values for rules; `inherited` are the keys that the user has not written."""

    def __init__(self, raw: Mapping[str, Any], problems: Iterable[str], inherited: frozenset[str]) -> None:
        self._raw, self._reported, self.inherited = raw, set(problems), inherited

    def __call__(self, path: str) -> Any:
        node: Any = self._raw
        reported = self._reported
        parts = path.split(".")
        for depth, part in enumerate(parts, start=1):
            if ".".join(parts[:depth]) in reported:
                raise ReportedError
            node = node[part]
        if any(problem.startswith(f"{path}.") for problem in reported):
            raise ReportedError
        return node


def _run(rule: Rule, get: Get) -> Iterator[str]:
    try:
        yield from rule(get)
    except ReportedError:
        return
