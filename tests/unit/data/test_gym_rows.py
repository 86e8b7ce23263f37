"""Records of NeMo-Gym: which can be used, and what is shown as their question."""

from typing import Any

import pytest

from nemo_rl_offload.data.gym_rows import fault_of, question_of, read_rows
from nemo_rl_offload.data.records import Record
from nemo_rl_offload.errors import DataError

GOOD: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "asker"},
    "answer": 2,
}
NO_INPUT, NO_NAME = "has no responses_create_params with an input", "has an agent_ref without a name"


def params(given: Any) -> dict[str, Any]:
    return {"responses_create_params": given}


def records(*contents: Any) -> list[Record]:
    return [Record(f"rows.jsonl:{number}", content) for number, content in enumerate(contents, start=1)]


def test_each_record_is_a_problem_that_is_its_own_entry() -> None:
    second = params({"input": "2 + 2?"})
    found = read_rows(records(GOOD, second), name="data.train", skips_bad=False)
    assert [problem.question for problem in found] == ["1 + 1?", "2 + 2?"]
    assert [problem.entry for problem in found] == [GOOD, second]
    assert [problem.answer for problem in found] == [None, None]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (GOOD, None),
        (params({"input": "1 + 1?"}), None),
        (params({"input": "1 + 1?"}) | {"agent_ref": None}, None),
        ({}, f"{NO_INPUT}, as NeMo-Gym's data have; it has no keys"),
        ({"question": "1 + 1?", "answer": "2"}, f"{NO_INPUT}, as NeMo-Gym's data have; it has question, answer"),
        (params("1 + 1?"), NO_INPUT),
        (params({}), NO_INPUT),
        (params({"input": ""}), NO_INPUT),
        (params({"input": []}), NO_INPUT),
        (params({"input": {"role": "user", "content": "1 + 1?"}}), NO_INPUT),
        (params({"input": "1 + 1?", "metadata": {"extra_body": '{"seed": 1}'}}), None),
        (params({"input": "1 + 1?", "metadata": {}}), None),
        (
            params({"input": "1 + 1?", "metadata": "x"}),
            "has responses_create_params.metadata that is no section of keys",
        ),
        (
            params({"input": "1 + 1?", "metadata": {"extra_body": "seed=1"}}),
            "has responses_create_params.metadata.extra",
        ),
        (params({"input": "1 + 1?", "metadata": {"extra_body": "[1]"}}), "has responses_create_params.metadata.extra"),
        (params({"input": "1 + 1?", "metadata": {"extra_body": 1}}), "has responses_create_params.metadata.extra"),
        (GOOD | {"agent_ref": "asker"}, NO_NAME),
        (GOOD | {"agent_ref": {}}, NO_NAME),
        (GOOD | {"agent_ref": {"name": 1}}, NO_NAME),
    ],
)
def test_what_is_wrong_with_a_record(row: dict[str, Any], fault: str | None) -> None:
    found = fault_of(row)
    assert found == fault if fault is None else found is not None and found.startswith(fault)


def test_bad_records_are_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.validation: 2 record\(s\) cannot be used") as caught:
        read_rows(records(GOOD, "is no JSON", {"a": 1}), name="data.validation", skips_bad=False)
    lines = str(caught.value).splitlines()
    assert lines[1] == "rows.jsonl:2: is no JSON"
    assert lines[2].startswith(f"rows.jsonl:3: {NO_INPUT}")


def test_bad_records_are_left_out_with_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"data\.train: left 2 bad record\(s\) out; 1 from rows.jsonl:1 on: is no JSON"
    ):
        found = read_rows(records("is no JSON", GOOD, {"a": 1}), name="data.train", skips_bad=True)
    assert [problem.entry for problem in found] == [GOOD]


@pytest.mark.parametrize("skips_bad", [True, False])
def test_without_an_episode_nothing_can_be_learned(skips_bad: bool) -> None:
    with pytest.raises(DataError, match=r"data\.train\.path: there are no episodes"):
        read_rows([], name="data.train", skips_bad=skips_bad)
    with pytest.raises(DataError, match=r"data\.train: 1 record\(s\) cannot be used"):
        read_rows(records({"a": 1}), name="data.train", skips_bad=skips_bad)


@pytest.mark.parametrize(
    ("given", "question"),
    [
        ("1 + 1?", "1 + 1?"),
        (["1 + 1?"], "1 + 1?"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}], "1 + 1?"),
        ([{"role": "user", "content": [{"text": "1 +"}, {"text": "1?"}]}], "1 +\n1?"),
        ([{"role": "user", "content": [{"text": "1"}, {"image_url": "x"}, "2"]}], "1\n"),
        ([{"role": "user", "content": {"a": 1}}], '{"a": 1}'),
    ],
)
def test_the_question_is_the_text_of_the_last_message(given: Any, question: str) -> None:
    assert question_of(params({"input": given})) == question
