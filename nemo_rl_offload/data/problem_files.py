"""Problems from files, each a question and what a scorer needs to judge an answer."""

from collections.abc import Mapping, Sequence

from nemo_rl_offload.data.program_tests import TESTS, tests_of
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.data.records import Record, report_bad_records
from nemo_rl_offload.errors import DataError

QUESTIONS = ("prompt", "question", "problem", "input")
ANSWERS = ("answer", "expected_answer", "output")


def read_problems(
    *parts: Sequence[Record], name: str, needs_answer: bool, needs_tests: bool = False, skips_bad: bool
) -> list[list[Problem]]:
    """Return the problems of each part of the records; ``name`` is the section that messages begin with.

    A problem's ``entry`` is the record, with the answer as text under ``answer``; where it needs tests these under
    ``tests``.

    Raises:
        DataError: the first part has none, or there are records that cannot be used and are not skipped.
    """
    bad: list[tuple[str, str]] = []
    found: list[list[Problem]] = []
    for records in parts:
        problems: list[Problem] = []
        for record in records:
            try:
                if isinstance(record.content, str):
                    raise ValueError(record.content)
                problems.append(_problem(record.content, name, needs_answer, needs_tests))
            except ValueError as error:
                bad.append((record.place, str(error)))
        found.append(problems)
    num_good = min((len(problems) for records, problems in zip(parts, found, strict=True) if records), default=0)
    report_bad_records(name, bad, num_good=num_good, skips_bad=skips_bad)
    if not found[0]:
        raise DataError(f"{name}.path: there are no problems. Give records with a question.")
    return found


def _problem(content: Mapping[str, object], name: str, needs_answer: bool, needs_tests: bool) -> Problem:
    question, answer = (next((content[key] for key in keys if key in content), None) for keys in (QUESTIONS, ANSWERS))
    has = f"it has {', '.join(content) or 'no keys'}"
    if not isinstance(question, str) or not question.strip():
        where = f"under one of {', '.join(QUESTIONS)}, or what {name}.input_key names"
        raise ValueError(f"has no question as text {where}; {has}")
    if needs_tests:
        given = next((content[key] for key in TESTS if key in content), None)
        if given is None:
            raise ValueError(f"has no tests under one of {', '.join(TESTS)}; {has}")
        return Problem(question, None, {**content, "tests": tests_of(given, content)})
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if needs_answer and not (isinstance(answer, str) and answer.strip()):
        where = f"under one of {', '.join(ANSWERS)}, or what {name}.output_key names"
        empty = next((key for key in ANSWERS if key in content), None)
        raise ValueError(f"has no answer {where}; {has}" + (f", and {empty} is {answer!r}" if empty else ""))
    entry = {**content, "answer": answer} if answer is not None else dict(content)
    return Problem(question, answer if isinstance(answer, str) else None, entry)
