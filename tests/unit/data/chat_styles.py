"""Chat templates in the styles of public models, each with what it makes of an assistant's turn.

Written anew and short, after how the models' rendered conversations look. A style is the oracle of its turns: `lead` is
blank text before the content that is learned with it, `middle` and `last` close a turn, `shows` is what the template
leaves of a content.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

Turn = dict[str, str]


def same(content: str, is_last: bool) -> str:
    return content


def stripped(content: str, is_last: bool) -> str:
    return content.strip()


def without_thinking(content: str, is_last: bool) -> str:
    return content.split("</think>")[-1]


def thinking_of_last(content: str, is_last: bool) -> str:
    """Qwen3 renders a last turn's thinking, an empty one where it has none, and drops that of earlier ones."""
    thought, mark, answer = content.partition("</think>")
    thought, answer = (thought, answer) if mark else ("", content)
    thought = thought.split("<think>")[-1].strip("\n")
    return f"<think>\n{thought}\n</think>\n\n{answer.lstrip(chr(10))}" if is_last else answer.lstrip("\n")


@dataclass(frozen=True)
class Style:
    """A chat template and its turns."""

    template: str
    eos: str
    last: str
    middle: str | None = None
    """As `last` where None."""
    lead: str = ""
    shows: Callable[[str, bool], str] = same
    generation: tuple[str, ...] = ()
    """`eos_token_id` of generation_config.json; the tokenizer's where empty."""
    refuses: frozenset[str] = frozenset()
    """Names of conversations that the template does not take."""
    kwargs: dict[str, object] = field(default_factory=dict)
    elsewhere: bool = False
    """The generation prompt begins otherwise than the turn."""

    def learned(self, contents: list[str]) -> str:
        """What is learned of a conversation that ends with an assistant's turn."""
        number = len(contents) - 1
        ends = [(self.last if self.middle is None else self.middle, False)] * number + [(self.last, True)]
        turns = zip(contents, ends, strict=True)
        return "".join(self.lead + self.shows(content, is_last) + end for content, (end, is_last) in turns)


def chatml(default_system: str = "", end: str = "<|im_end|>", before: str = "") -> str:
    system = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + default_system + end + "\n{% endif %}"
    return (
        before
        + (system if default_system else "")
        + "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '"
        + end
        + "' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def headers(
    open_: str, close: str, end: str, before: str = "{{ bos_token }}", content: str = "m['content'] | trim"
) -> str:
    """Llama-3's form: a role between two marks, then the text."""
    return (
        before
        + "{% for m in messages %}{{ '"
        + open_
        + "' + m['role'] + '"
        + close
        + "' + ("
        + content
        + ") + '"
        + end
        + "' }}{% endfor %}{% if add_generation_prompt %}{{ '"
        + open_
        + "assistant"
        + close
        + "' }}{% endif %}"
    )


ALTERNATE = (
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = none %}{% endif %}"
    + ALTERNATE
    + "{% for m in rest %}{% if loop.index0 == 0 and system is not none %}"
    "{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}{% else %}{% set text = m['content'] %}"
    "{% endif %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_1 = (
    "{{ bos_token }}{% set rest = messages %}"
    + ALTERNATE
    + "{% for m in rest %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_3 = (  # the system's text stands before the last question
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in rest %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}" + ALTERNATE + "{{ bos_token }}{% for m in rest %}{% if m['role'] == 'user' %}[INST] "
    "{%- if loop.index0 == ns.last and system %}{{ ' ' + system + '\n\n' }}{% else %}{{ ' ' }}{% endif %}"
    "{{ m['content'] }}[/INST]{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<|Asker|>' + m['content'] }}"
    "{% else %}{{ '<|Helper|>' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Helper|>' }}{% endif %}"
)
DEEPSEEK_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
R1 = DEEPSEEK.replace("m['content'] + eos_token", "m['content'].split('</think>')[-1] + eos_token").replace(
    "'<|Helper|>' }}{% endif %}", "'<|Helper|><think>\n' }}{% endif %}"
)
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m['content'] %}{% if m['role'] == 'assistant' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}{% elif '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}"
    "{% else %}{{ '<|im_start|>assistant\n' + text }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endif %}"
    "{% if loop.first and tools %}{{ '# Tools\n' + tools | tojson + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
GLM_4 = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' +"
    " m['content'] + ('<|return|>' if loop.last else '<|end|>') }}{% else %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + ' ' }}{% elif m['role'] == 'user' %}"
    "{{ 'USER: ' + m['content'] + ' ' }}{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
ALPACA = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% elif m['role'] == 'user' %}"
    "{{ '### Instruction:\n' + m['content'] + '\n\n' }}{% else %}"
    "{{ '### Response:\n' + m['content'] + eos_token + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
FALCON = (
    "{% for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{% if m['role'] == 'system' %}{{ 'System: ' + m['content'] }}{% elif m['role'] == 'user' %}"
    "{{ 'User: ' + m['content'] }}{% else %}{{ 'Falcon: ' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nFalcon:' }}{% endif %}"
)
TULU = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + m['content'] + eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
LINES = """\
{% for m in messages %}
    {% if m['role'] == 'assistant' %}
{{- '<|assistant|>' }}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}
    {% else %}
{{- '<|' + m['role'] + '|>' + m['content'] }}
    {% endif %}
    {% if loop.index0 > 90 %}
        {% break %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}"""
COMMAND_R = headers("<|START_OF_TURN_TOKEN|><|", "|>", "<|END_OF_TURN_TOKEN|>")
ZEPHYR = headers("<|", "|>\n", "</s>\n", before="", content="m['content']")
PHI_3 = headers("<|", "|>\n", "<|end|>\n", before="", content="m['content']")
PHI_4 = headers("<|im_start|>", "<|im_sep|>", "<|im_end|>", before="", content="m['content']")

STYLES: dict[str, Style] = {
    "chatml": Style(chatml(), "<|im_end|>", "<|im_end|>\n"),
    "qwen2": Style(
        chatml("You are a helpful assistant."), "<|im_end|>", "<|im_end|>\n", generation=("<|im_end|>", "<|endoftext|>")
    ),
    "qwen2-base": Style(chatml("Be kind."), "<|endoftext|>", "<|im_end|>\n"),
    "qwen3": Style(QWEN_3, "<|im_end|>", "<|im_end|>\n", shows=thinking_of_last),
    "qwen3-without-thinking": Style(
        QWEN_3,
        "<|im_end|>",
        "<|im_end|>\n",
        shows=lambda content, is_last: content,
        kwargs={"enable_thinking": False},
        refuses=frozenset({"thinking"}),  # the prompt ends a thinking that the turn does not have
        elsewhere=True,
    ),
    "llama-2": Style(LLAMA_2, "</s>", " </s>", lead=" ", shows=stripped),
    "llama-3": Style(
        headers("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
        "<|eot_id|>",
        "<|eot_id|>",
        shows=stripped,
        generation=("<|endoftext|>", "<|eot_id|>"),
    ),
    "mistral-1": Style(MISTRAL_1, "</s>", "</s>", refuses=frozenset({"system"})),
    "mixtral": Style(
        MISTRAL_1.replace("m['content'] + eos", "' ' + m['content'] + eos"),
        "</s>",
        "</s>",
        lead=" ",
        refuses=frozenset({"system"}),
    ),
    "mistral-3": Style(MISTRAL_3, "</s>", "</s>", lead=" ", shows=stripped),
    "gemma": Style(
        GEMMA,
        "<eos>",
        "<end_of_turn>\n",
        shows=stripped,
        generation=("<eos>", "<end_of_turn>"),
        refuses=frozenset({"system"}),
    ),
    "phi-3": Style(PHI_3, "<|endoftext|>", "<|end|>\n", generation=("<|endoftext|>", "<|end|>")),
    "phi-4": Style(PHI_4, "<|im_end|>", "<|im_end|>"),
    "deepseek-2": Style(DEEPSEEK_2, "<|end_of_sentence|>", "<|end_of_sentence|>", lead=" "),
    "deepseek-3": Style(DEEPSEEK, "<|end_of_sentence|>", "<|end_of_sentence|>"),
    "deepseek-r1": Style(R1, "<|end_of_sentence|>", "<|end_of_sentence|>", shows=without_thinking, elsewhere=True),
    "glm-4": Style(GLM_4, "<|endoftext|>", "", "<|user|>", generation=("<|endoftext|>", "<|user|>", "<|observation|>")),
    "harmony": Style(HARMONY, "<|return|>", "<|return|>", "", lead="<|channel|>final<|message|>"),
    "zephyr": Style(ZEPHYR, "</s>", "</s>\n"),
    "vicuna": Style(VICUNA, "</s>", "</s>", lead=" "),
    "alpaca": Style(ALPACA, "</s>", "</s>\n\n"),
    "command-r": Style(COMMAND_R, "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", shows=stripped),
    "yi": Style(chatml(before="{{ bos_token }}"), "<|im_end|>", "<|im_end|>\n"),
    "internlm-2": Style(chatml(before="{{ bos_token }}"), "</s>", "<|im_end|>\n", generation=("</s>", "<|im_end|>")),
    "falcon": Style(FALCON, "<|endoftext|>", "", lead=" "),
    "tulu": Style(TULU, "<|endoftext|>", "<|endoftext|>"),
    "lines": Style(LINES, "</s>", "</s>"),  # over several lines, with what only transformers' Jinja has
    "smollm": Style(chatml("You are SmolLM."), "<|im_end|>", "<|im_end|>\n"),
}
SPECIAL = (
    *(
        "<|bos|>",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_sep|>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "<eos>",
    ),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>"),
    *("<|Asker|>", "<|Helper|>", "<|end_of_sentence|>", "<think>", "</think>", "[gMASK]", "<sop>", "<|user|>"),
    *("<|assistant|>", "<|system|>", "<|observation|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
)


def talk(*contents: str, system: str | None = None) -> list[Turn]:
    """Turns of user and assistant."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


CONVERSATIONS: dict[str, list[Turn]] = {
    "single": talk("What is 1 + 1?", "It is two."),
    "several": talk("Hello there", "Hi.", "And you?", "Fine, thanks.", "Good", "Bye."),
    "system": talk("Hello", "Hi.", "More", "No.", system="Be brief."),
    "unicode": talk("Größe? 😀", "Grün — naïve ☕ e\u0301", "日本語", "はい。"),
    "alike": talk("yes", "yes", "yes", "yes", "yes", "yes"),
    "marks": talk("THE-TURN-0 and </s>", "THE-TURN-1 <|im_end|> [/INST] x", "THE-ANSWER <|user|>?", "THE-TURN-0."),
    "thinking": talk(
        "1?", "<think>\nfirst thought\n</think>\n\nOne.", "2?", "<think>\nsecond thought\n</think>\n\nTwo."
    ),
    "blanks": talk(" a ", "two\n\nparts", " b", "c d"),
}
