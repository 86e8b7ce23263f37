"""Chats over HTTP, as a program asks for them: what reaches the engines, and what comes back."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from patience import PATIENCE_S

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.loader import resolve_tokenizer_path
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.errors import WorkerError
from nemo_rl_offload.generation.chat_prompts import ChatPrompts
from nemo_rl_offload.generation.chat_server import Call, ChatServer, identity
from nemo_rl_offload.generation.interface import Give
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.chat_parsers import ChatParsers, Said

LONGEST = 120
SAMPLING = Sampling(LONGEST, temperature=0.7, top_p=0.9)
TEMPLATE = (
    "{% for m in messages if m['role'] != 'developer' %}{{ m['role'][0] + ':' + m['content'] + eos_token }}{% endfor %}"
    "{{ mark }}{% if add_generation_prompt %}a:{% endif %}"
)
QUESTION = [{"role": "user", "content": "1?"}]
END_ID = 256
Ask = Callable[..., tuple[int, Any]]


class Stream:
    """Gives each response in a thread of its own: its place among all, `hi`, and an end; or keeps those it `holds`."""

    holds = False
    error: WorkerError | None = None

    def __init__(self, *, finished: bool = True) -> None:
        self.finished = finished
        self.asked: list[tuple[list[int], int, int, int]] = []
        self.held: list[tuple[Give, Response]] = []
        self.is_asked = threading.Event()

    def submit(self, places: Sequence[int], prompts: Sequence[list[int]], seed: int) -> None:
        raise AssertionError("chats are asked one by one")

    def take(self) -> list[tuple[int, Response]]:
        raise AssertionError("chats are asked one by one")

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def ask(self, prompt: list[int], seed: int, place: int, max_new_tokens: int, give: Give) -> None:
        self.asked.append((prompt, seed, place, max_new_tokens))
        tokens = [ord("0") + len(self.asked), *b"hi", *([END_ID] if self.finished else [])]
        response = Response(tokens, [-0.25 * place for place in range(len(tokens))], self.finished)
        if self.holds:
            self.held.append((give, response))
        else:
            threading.Thread(target=give, args=(response,)).start()
        self.is_asked.set()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_tokenizer_path("examples/models/tiny_speller"))


@pytest.fixture
def parsers(tokenizer: Any, make_policy: Callable[..., Any]) -> Any:
    return ChatParsers(make_policy()["generation"]["vllm_cfg"], tokenizer, "policy")


@pytest.fixture
def server(tokenizer: Any, parsers: Any) -> Iterator[ChatServer]:
    prompts = ChatPrompts(tokenizer, [END_ID], TEMPLATE, {"mark": "!"})
    server = ChatServer(prompts, parsers, [END_ID], LONGEST, {"mark": "."})
    yield server
    server.close()


@pytest.fixture
def ask(server: ChatServer) -> Ask:
    """Ask for a chat's completion: the status, and the answer's content."""

    def ask(messages: Any = QUESTION, raw: bytes | None = None, **others: Any) -> tuple[int, Any]:
        content = json.dumps({"messages": messages, **others}).encode() if raw is None else raw
        request = urllib.request.Request(f"{server.base_url}/chat/completions", content)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
            return error.code, json.loads(said) if error.code == 400 else said

    return ask


def refused(answer: tuple[int, Any]) -> str:
    status, content = answer
    assert status == content["code"] == 400
    assert content["type"] == "BadRequestError"
    return str(content["message"])


def ids_of(text: str) -> list[int]:
    """The tokens are bytes, and the end."""
    return [token for part in text.split("|") for token in [*part.encode(), END_ID]][:-1]


def test_a_message_has_the_tokens_that_were_drawn_and_their_log_probabilities(server: ChatServer, ask: Ask) -> None:
    begun = server.begin(Stream(), SAMPLING, 7)
    status, answer = ask(model="policy", **identity(begun.number, 3))
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "1hi",
        "prompt_token_ids": ids_of("u:1?|.a:"),
        "generation_token_ids": [*b"1hi", END_ID],
        "generation_log_probs": [0, -0.25, -0.5, -0.75],
    }
    assert choice["finish_reason"] == "stop"
    assert (answer["object"], answer["model"]) == ("chat.completion", "policy")
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
    response = Response([*b"1hi", END_ID], [0, -0.25, -0.5, -0.75], finished=True)
    assert begun.calls == {3: [Call(ids_of("u:1?|.a:"), response)]}
    assert begun.num_tokens == 4


def test_a_response_without_an_end_is_too_long(server: ChatServer, ask: Ask) -> None:
    server.begin(Stream(finished=False), SAMPLING, 7)
    _, answer = ask()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "1hi"
    assert choice["message"]["generation_token_ids"] == list(b"1hi")


def test_calls_of_tools_and_thinking_are_in_the_message(tokenizer: Any) -> None:
    """By a parser that sees the text's tokens, what was asked, and the template's variables."""
    seen: list[Any] = []
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}

    class Parsers:
        def check(self, asked: Any) -> None: ...

        def __call__(self, token_ids: Sequence[int], asked: Any, variables: Any) -> Said:
            seen.append((token_ids, asked["tools"], variables))
            return Said(None, "so", (call,))

    parsers: Any = Parsers()
    prompts = ChatPrompts(tokenizer, [END_ID], "{{ tools | tojson }}{{ mark }}")
    server = ChatServer(prompts, parsers, [END_ID], LONGEST, {"mark": ".", "other": 1})
    try:
        server.begin(stream := Stream(), SAMPLING, 7)
        asked = {"messages": QUESTION, "tools": [call], "chat_template_kwargs": {"mark": "?"}}
        request = urllib.request.Request(f"{server.base_url}/chat/completions", json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            (choice,) = json.load(answer)["choices"]
    finally:
        server.close()
    assert bytes(stream.asked[0][0]).decode() == json.dumps([call]) + "?"
    assert seen == [(list(b"1hi"), [call], {"mark": "?", "other": 1})]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["tool_calls"]) == (None, [call])
    assert message["reasoning"] == message["reasoning_content"] == "so"


def test_an_episodes_turns_have_its_place_and_seeds_of_their_own(server: ChatServer, ask: Ask) -> None:
    """The second turn continues the tokens of the first, whatever its text says by now."""
    first, second = Stream(), Stream()
    begun = server.begin(first, SAMPLING, 7)
    server.begin(second, SAMPLING, 8)
    for place in (5, 5, 2):
        assert ask(**identity(begun.number, place))[0] == 200
    _, answer = ask(**identity(begun.number, 5))
    turn = answer["choices"][0]["message"] | {"content": "other"}
    for turns in (1, 2):
        more = [*QUESTION, *[turn, {"role": "user", "content": "2?"}] * turns]
        assert ask(more, **identity(begun.number, 5))[0] == 200
    later = [*b"4hi", END_ID, *ids_of("u:2?|.a:")]
    asked = ids_of("u:1?|.a:")
    assert [(each[0], each[3]) for each in first.asked[:4]] == [(asked, LONGEST - 8)] * 4
    assert len({each[1:3] for each in first.asked}) == 6, "the same once more is drawn anew"
    assert len({each[1] for each in first.asked}) == 4, "by episode, and by what it continues"
    assert first.asked[4][0] == ids_of("u:1?|.a:") + later
    assert second.asked == []
    assert [len(begun.calls[place]) for place in (2, 5)] == [1, 5]


def test_an_episodes_draws_do_not_depend_on_the_order_of_its_requests(server: ChatServer, ask: Ask) -> None:
    """Such as variants of one turn that an agent asks for at once."""
    drawn = []
    for questions in ("ab", "ba"):
        begun = server.begin(stream := Stream(), SAMPLING, 7)
        for question in questions:
            assert ask([{"role": "user", "content": question}], **identity(begun.number, 1))[0] == 200
        drawn.append({tuple(prompt): (seed, place) for prompt, seed, place, _ in stream.asked})
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0].values())) == 2


def test_requests_without_an_episode_belong_to_the_newest_round_and_are_counted(server: ChatServer, ask: Ask) -> None:
    """A response depends on what was asked and how often, and on the round's seed."""
    first, second = Stream(), Stream()
    server.begin(first, SAMPLING, 7)
    begun = server.begin(second, SAMPLING, 8)
    for question in ("1?", "2?", "1?", "1?"):
        assert ask([{"role": "user", "content": question}], temperature=0.1)[0] == 200
    one, two, again, third = ((seed, place) for _, seed, place, _ in second.asked)
    assert [one[1], again[1], third[1], two[1]] == [1, 2, 3, 1]
    assert one[0] == again[0] == third[0]
    assert one[0] != two[0]
    assert first.asked == []
    assert begun.calls == {}
    assert begun.num_tokens == 16
    server.end(begun)
    assert ask()[0] == 200
    assert first.asked[0][1] ^ 7 == one[0] ^ 8


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({}, LONGEST - 8),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": LONGEST}, LONGEST - 8),
    ],
)
def test_a_response_has_as_many_tokens_as_are_asked_for_and_have_room(
    server: ChatServer, ask: Ask, limits: dict[str, int | None], wanted: int
) -> None:
    server.begin(stream := Stream(), SAMPLING, 7)
    assert ask(**limits)[0] == 200
    assert stream.asked[0][3] == wanted


def test_a_prompt_leaves_room_for_a_token(server: ChatServer, ask: Ask) -> None:
    server.begin(stream := Stream(), SAMPLING, 7)
    longest = LONGEST - 1 - 6
    assert ask([{"role": "user", "content": "x" * longest}])[0] == 200
    assert (len(stream.asked[0][0]), stream.asked[0][3]) == (LONGEST - 1, 1)
    said = refused(ask([{"role": "user", "content": "x" * (longest + 1)}]))
    assert f"maximum context length is {LONGEST} tokens, and the messages have {LONGEST}." in said
    assert len(stream.asked) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 1.0}, "temperature 1.0 is not the run's 0.7"),
        ({"temperature": 0}, "temperature 0 is not the run's 0.7"),
        ({"top_p": 1.0}, "top_p 1.0 is not the run's 0.9"),
        ({"temperature": 0.7, "top_p": 0.9}, None),
        ({"temperature": 0.7 + 1e-9, "top_p": None}, None),
    ],
)
def test_an_episodes_sampling_is_the_runs(server: ChatServer, ask: Ask, given: Any, said: str | None) -> None:
    begun = server.begin(stream := Stream(), SAMPLING, 7)
    answer = ask(**given, **identity(begun.number, 0))
    if said is None:
        assert answer[0] == 200
    else:
        assert refused(answer).startswith(said)
    assert len(stream.asked) == (said is None)
    assert ask(**given)[0] == 200, "a judge is answered"
    assert ask(**given)[0] == 200
    told = server.notices()
    assert len(told) == (said is not None)
    assert said is None or said in told[0]


@pytest.mark.parametrize(
    ("nothing", "something"),
    [
        ({"stop": []}, {"stop": ["x"]}),
        ({"stop": ["END"]}, {"stop": ["END", "x"]}),
        ({"stop": "END"}, {"stop": "x"}),
        ({"bad_words": []}, {"bad_words": ["x"]}),
        ({"min_tokens": 0}, {"min_tokens": 3}),
        ({"ignore_eos": False}, {"ignore_eos": True}),
        ({"stop_token_ids": []}, {"stop_token_ids": [3]}),
        ({"top_k": None}, {"top_k": -1}),
        ({"top_k": 7}, {"top_k": 5}),
        ({"min_p": 0.0}, {"min_p": 0.1}),
        ({"frequency_penalty": 0}, {"frequency_penalty": 0.5}),
        ({"presence_penalty": 0.0}, {"presence_penalty": -0.5}),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.1}),
        ({"logit_bias": {}}, {"logit_bias": {"3": 1}}),
    ],
)
def test_what_no_response_follows_is_refused_in_an_episode_and_told_beside_it(
    server: ChatServer, ask: Ask, nothing: dict[str, Any], something: dict[str, Any]
) -> None:
    begun = server.begin(Stream(), replace(SAMPLING, top_k=7, stop_strings=("END",)), 7)
    assert ask(**nothing, **identity(begun.number, 0))[0] == 200
    assert ask(**nothing)[0] == 200
    assert server.notices() == []
    (key,) = something
    assert refused(ask(**something, **identity(begun.number, 0))).startswith(f"{key} ")
    assert ask(**something)[0] == 200
    (told,) = server.notices()
    assert told.startswith("a request of no episode, such as a judge's")
    assert key in told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stream": True}, "nothing is streamed here. Set stream to false"),
        ({"n": 2}, "one response. Set n to 1"),
        ({"n": 0}, "one response. Set n to 1"),
        ({"tool_choice": "required"}, "tool_choice 'required' needs constrained sampling"),
        ({"tool_choice": {"type": "function"}}, "needs constrained sampling"),
        ({"response_format": {"type": "json_object"}}, "response_format needs constrained sampling"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "neither text nor parts of text"),
        ({"messages": [{"role": "", "content": "1?"}]}, "the chat template refuses the messages"),
    ],
)
def test_what_is_not_here_is_refused(server: ChatServer, ask: Ask, given: dict[str, Any], said: str) -> None:
    server.begin(stream := Stream(), SAMPLING, 7)
    assert said in refused(ask(**{"messages": QUESTION} | given))
    assert stream.asked == []


def test_what_asks_for_nothing_special_is_answered(server: ChatServer, ask: Ask) -> None:
    server.begin(Stream(), SAMPLING, 7)
    for choice in (None, "auto", "none"):
        answer = ask(stream=False, n=1, tool_choice=choice, response_format={"type": "text"}, tools=[], seed=3)
        assert answer[0] == 200


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff", b"[]", b"3", b"{}", b'{"messages": 3}', b'{"messages": [3]}', b'{"messages": [{}]}'],
)
def test_what_is_no_chat_is_refused(server: ChatServer, ask: Ask, raw: bytes) -> None:
    server.begin(stream := Stream(), SAMPLING, 7)
    assert refused(ask(raw=raw)).startswith(("not a chat: ", "the chat template refuses"))
    assert stream.asked == []
    assert ask()[0] == 200, "the server goes on"


@pytest.mark.parametrize("known", ["x", ["x", 0], [0, "x"], {"a": 1}, [None, None], [], [0]])
def test_an_episode_is_two_numbers(server: ChatServer, ask: Ask, known: Any) -> None:
    server.begin(Stream(), SAMPLING, 7)
    assert refused(ask(nemo_rl_offload_episode=known)).startswith("not a chat: ")


def test_requests_of_an_ended_round_are_refused(server: ChatServer, ask: Ask) -> None:
    said = "no rollout is under way that this belongs to"
    assert refused(ask()) == said
    ended = server.begin(stream := Stream(), SAMPLING, 7)
    server.end(ended)
    server.end(ended)
    assert refused(ask(**identity(ended.number, 0))) == refused(ask()) == said
    begun = server.begin(stream, SAMPLING, 7)
    assert begun.number != ended.number
    assert refused(ask(**identity(ended.number, 0))) == said
    assert ask(**identity(begun.number, 0))[0] == 200


def test_a_round_is_finished_when_what_was_asked_is_answered(server: ChatServer, ask: Ask) -> None:
    """Whoever asked may have given up; nothing more is taken meanwhile."""
    assert server.finish(server.begin(Stream(), SAMPLING, 7)).result(PATIENCE_S) is None
    stream = Stream()
    stream.holds = True
    begun = server.begin(stream, SAMPLING, 7)
    asking = Asking(ask, **identity(begun.number, 0))
    assert stream.is_asked.wait(PATIENCE_S)
    finished = server.finish(begun)
    assert refused(ask(**identity(begun.number, 1))) == "no rollout is under way that this belongs to"
    assert not finished.done()
    ((give, response),) = stream.held
    give(response)
    finished.result(PATIENCE_S)
    asking.join(PATIENCE_S)
    assert len(begun.calls[0]) == 1


def test_a_server_that_closes_does_not_wait_for_a_round_that_finishes(server: ChatServer, ask: Ask) -> None:
    stream = Stream()
    stream.holds = True
    begun = server.begin(stream, SAMPLING, 7)
    asking = Asking(ask, **identity(begun.number, 0))
    assert stream.is_asked.wait(PATIENCE_S)
    server.finish(begun)
    server.close()
    asking.join(PATIENCE_S)
    assert not server._thread.is_alive()
    assert not asking.is_alive()


class Asking(threading.Thread):
    """A request under way, and how it ended."""

    def __init__(self, ask: Ask, **others: Any) -> None:
        super().__init__(daemon=True)
        self._ask, self._others = ask, others
        self.answer: tuple[int, Any] | None = None
        self.error: OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._ask(**self._others)
        except OSError as error:
            self.error = error

    def has_ended(self) -> bool:
        self.join(PATIENCE_S / 2)  # less than the request itself waits
        return not self.is_alive()


def test_who_waits_when_a_round_ends_hears_that_there_is_nothing(
    server: ChatServer, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """Responses of it that come later are nobody's; other rounds go on."""
    other = server.begin(Stream(), SAMPLING, 8)
    ended = server.begin(stream := Stream(), SAMPLING, 7)
    stream.holds = True
    waiting = Asking(ask, **identity(ended.number, 0))
    assert stream.is_asked.wait(PATIENCE_S)
    server.end(ended)
    assert waiting.has_ended()
    assert isinstance(waiting.error, ConnectionError)
    ((give, response),) = stream.held
    give(response)
    assert ask(**identity(other.number, 0))[0] == 200
    assert ended.calls == {}
    assert not ended.waiting
    assert caplog.records == []


def test_requests_do_not_wait_for_each_other(server: ChatServer, ask: Ask) -> None:
    begun = server.begin(stream := Stream(), SAMPLING, 7)
    stream.holds = True
    waiting = Asking(ask, **identity(begun.number, 0))
    assert stream.is_asked.wait(PATIENCE_S)
    stream.holds = False
    assert ask(**identity(begun.number, 1))[0] == 200
    assert waiting.is_alive()
    ((give, response),) = stream.held
    give(response)
    assert waiting.has_ended()
    assert waiting.answer is not None
    assert waiting.answer[1]["choices"][0]["message"]["content"] == "1hi"
    assert [call.response.tokens[0] for call in (*begun.calls[0], *begun.calls[1])] == [ord("1"), ord("2")]


def test_engines_that_failed_are_no_fault_of_the_request(server: ChatServer, ask: Ask) -> None:
    server.begin(stream := Stream(), SAMPLING, 7)
    stream.error = WorkerError("gone")
    assert ask()[0] == 500
    assert stream.asked == []


def test_what_the_template_leaves_out_is_told_once(server: ChatServer, ask: Ask) -> None:
    server.begin(Stream(), SAMPLING, 7)
    for _ in range(2):
        assert ask([{"role": "developer", "content": "Be brief."}, *QUESTION])[0] == 200
    (told,) = server.notices()
    assert "leaves out messages of the role developer" in told
    assert server.notices() == []


def test_a_closed_server_answers_nobody(server: ChatServer, ask: Ask) -> None:
    server.begin(Stream(), SAMPLING, 7)
    assert ask()[0] == 200
    server.close()
    server.close()
    with pytest.raises(OSError, match="refused"):
        ask()


def test_a_server_that_is_closed_keeps_nobody_waiting(server: ChatServer, ask: Ask) -> None:
    server.begin(stream := Stream(), SAMPLING, 7)
    stream.holds = True
    waiting = Asking(ask)
    assert stream.is_asked.wait(PATIENCE_S)
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < PATIENCE_S / 2
    assert waiting.has_ended()
    assert isinstance(waiting.error, ConnectionError)


@pytest.mark.parametrize("limit", [{"max_tokens": -5}, {"max_completion_tokens": -1}])
def test_a_response_has_at_least_one_token(server: ChatServer, ask: Ask, limit: dict[str, int]) -> None:
    server.begin(stream := Stream(), SAMPLING, 7)
    assert "at least one token" in refused(ask(**limit))
    assert stream.asked == []
