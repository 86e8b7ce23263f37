"""Records of NeMo-Gym: each an episode as its agent takes it, with the chat that it begins with."""

import json
from collections.abc import Mapping, Sequence

from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.data.records import Record, report_bad_records
from nemo_rl_offload.errors import DataError
from nemo_rl_offload.specs.documents import parse_json

PARAMS, AGENT = "responses_create_params", "agent_ref"


def read_rows(records: Sequence[Record], *, name: str, skips_bad: bool) -> list[Problem]:
    """Return a problem for each record, whose ``entry`` is the record, and whose question is its last message.

    ``name`` is the section that messages begin with.

    Raises:
        DataError: there are none, or records that cannot be used and are not skipped.
    """
    bad: list[tuple[str, str]] = []
    found: list[Problem] = []
    for record in records:
        fault = record.content if isinstance(record.content, str) else fault_of(record.content)
        if fault is not None or isinstance(record.content, str):
            bad.append((record.place, str(fault)))
        else:
            found.append(Problem(question_of(record.content), None, record.content))
    report_bad_records(name, bad, num_good=len(found), skips_bad=skips_bad)
    if not found:
        raise DataError(f"{name}.path: there are no episodes. Give records with {PARAMS}.")
    return found


def fault_of(row: Mapping[str, object]) -> str | None:
    """What is wrong with a record; None for nothing."""
    params, agent = row.get(PARAMS), row.get(AGENT)
    if not isinstance(params, Mapping) or not isinstance(params.get("input"), str | list) or not params["input"]:
        return f"has no {PARAMS} with an input, as NeMo-Gym's data have; it has {', '.join(row) or 'no keys'}"
    metadata = params.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        return f"has {PARAMS}.metadata that is no section of keys"
    try:
        extra = parse_json((metadata or {}).get("extra_body") or "{}")
    except (AttributeError, ValueError):
        extra = None
    if not isinstance(extra, Mapping):
        return f"has {PARAMS}.metadata.extra_body that is no JSON of keys"
    if agent is not None and not (isinstance(agent, Mapping) and isinstance(agent.get("name"), str)):
        return f"has an {AGENT} without a name"
    return None


def question_of(row: Mapping[str, object]) -> str:
    """The text of the last message of the chat that an episode begins with."""
    params = row[PARAMS]
    assert isinstance(params, Mapping), "fault_of has looked"
    given = params["input"]
    if isinstance(given, str):
        return given
    content = given[-1].get("content") if isinstance(given[-1], Mapping) else given[-1]
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else json.dumps(content)
