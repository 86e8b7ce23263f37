"""What a chat template is given, and what it writes around a turn."""

import pytest

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.chat_template import (
    PASSTHROUGH,
    TurnTexts,
    always_prompts,
    keeps_thinking,
    renderer,
    turn_texts,
    variables_of,
)

CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_what_a_template_reads() -> None:
    template = (
        "{% for m in messages %}{{ m }}{% endfor %}{% if tools %}{{ strftime_now('%Y') }}{% endif %}{{ namespace() }}"
    )
    assert variables_of(template + "{% generation %}{{ enable_thinking }}{% endgeneration %}") == {
        "messages",
        "tools",
        "enable_thinking",
    }


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages", "{% for m in messages %}", "{{ a | nofilter }}"])
def test_what_is_no_jinja_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"is no Jinja template: .*Mend it"):
        variables_of(template)


@pytest.mark.parametrize(
    ("template", "texts", "opens"),
    [
        (CHATML, TurnTexts("<assistant>", "<assistant>", "!"), True),
        (
            CHATML + "{% if add_generation_prompt %}<think>{% endif %}",
            TurnTexts("<assistant><think>", "<assistant>", "!"),
            False,
        ),
        (CHATML.partition("{% if")[0], TurnTexts("", "<assistant>", "!"), False),
        ("{% for m in messages %}[{{ m.content }} ]{% endfor %}", TurnTexts("", "[", " ]"), False),
        ("{% for m in messages %} {{ m.content }}!{% endfor %}", TurnTexts("", " ", "!"), True),
        (PASSTHROUGH, TurnTexts("", "", ""), True),
    ],
)
def test_texts_around_a_turn(template: str, texts: TurnTexts, opens: bool) -> None:
    found = turn_texts(renderer(template, {"eos_token": "!"}))
    assert found == texts
    assert found.prompt_opens_the_turn == opens


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{{ messages[0].nothing + 1 }}", "x", "{{ messages[5].content }}{{ 1 / 0 }}"],
)
def test_a_template_that_refuses_the_question_tells_nothing(template: str) -> None:
    render = renderer(template, {})
    assert turn_texts(render) is None
    assert keeps_thinking(render) == (template != "x")


def test_thinking_of_earlier_turns() -> None:
    assert keeps_thinking(renderer(CHATML, {"eos_token": "!"}))
    forgets = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
    assert not keeps_thinking(renderer(forgets, {"eos_token": "!"}))


ALWAYS = CHATML.replace("{% if add_generation_prompt %}<assistant>{% endif %}", "<assistant>")
SPOKEN = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
INST = (
    "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "always"),
    [
        (ALWAYS, True),
        (CHATML, False),
        (CHATML.partition("{% if")[0], False),
        (SPOKEN, False),
        (INST, False),
        (PASSTHROUGH, False),
    ],
)
def test_a_template_that_prompts_unasked(template: str, always: bool) -> None:
    render = renderer(template, {"eos_token": "</s>"})
    texts = turn_texts(render)
    assert texts is not None
    assert always_prompts(render, texts) == always
