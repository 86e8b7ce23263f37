"""Answers that a response names by a word, "Answer: ...", and how their text is compared.

`dapo` is the rule of DAPO (https://arxiv.org/abs/2503.14476, section 2.3) for answers that are whole numbers or short
formulas: the last "Answer:" near the response's end, normalized as Minerva's answers are
(https://arxiv.org/abs/2206.14858, appendix G), and then the same text. Multiple choice is a letter behind such a word,
in English or in one of the languages of MMLU's translations (https://github.com/openai/simple-evals). What is replaced
and in which order are facts of these benchmarks: another order would call other answers right.
"""

import re

DAPO_TAIL_CHARACTERS = 300
"""How much of a response's end is looked at."""
_DAPO_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""Words and marks that are left out."""
_UNWRAPPED = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    *((re.compile(rf"\\{command}\{{(.*?)\}}"), r"\1") for command in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)
_WORDS = (
    *(r"Answer\s*:", r"Answer\s*:\u200b{6}", r"উত্তর\s*:", r"उत्तर\s*:", "উত্তরঃ", r"Antwort\s*:", r"답변\s*:"),
    *(r"정답\s*:", r"답\s*:", r"答案\s*[\uff1a:]", r"答\s*[\uff1a:]", r"答复\s*\uff1a", r"答曰\s*\uff1a", "الإجابة:"),
    *("الجواب:", "إجابة:", "الإجابة النهائية:", "الإجابة الصحيحة:", "الإجابة الصحيحة هي:", "الإجابة هي:"),
    *("الجواب النهائي:", r"Respuesta\s*:", r"Risposta\s*:", r"答え\s*[\uff1a:]", r"回答\s*[\uff1a:]", r"解答\s*:"),
    *(r"Jawaban\s*:", r"Réponse\s*:", r"Resposta\s*:", r"Jibu\s*:", r"Idahun\s*:", r"Ìdáhùn\s*:"),
    *(r"Idáhùn\s*:", "A\u0300m\u1ecd\u0300na\u0300\\s*:", r"Àdáhùn\s*:", "A\u0300nu\u0301go\u0323\\s*:"),
    r"Àṣàyàn\s*:",
)
"""\"Answer:\" in the languages, in the order in which they are looked for."""
_LETTERS = "A-D\u0623-\u062fঅবডঢ\uff21\uff22\uff23\uff24"
_CHOICE = [re.compile(rf"(?i){word}[ \t]*([{_LETTERS}])") for word in _WORDS]
_ENGLISH_CHOICE = re.compile(r"(?i)Answer\s*:[ \t]*([A-Z])")
_LATIN = str.maketrans("أبجدঅবডঢ\uff21\uff22\uff23\uff24", "ABCD" * 3)
_MARKUP = (
    *("**", r"$\boxed{", "}$", r"\$", r"$\text{", "$", r"\mathrm{", r"\{", r"\text", r"\(", r"\mathbf{", "{"),
    r"\boxed",
)


type Compared = tuple[bool, str | None]
"""Whether a response is right, and its answer as it is compared; None: it has none, and is wrong."""


def is_dapo_answer(answer: str, response: str) -> Compared:
    """Whether the last "Answer:" is the record's, both normalized."""
    found = _DAPO_ANSWER.findall(response[-DAPO_TAIL_CHARACTERS:])
    return _compared(_normalized(found[-1]) if found else None, _normalized(answer))


def is_english_choice(answer: str, response: str) -> Compared:
    """Whether the first "Answer:" is followed by the record's letter."""
    match = _ENGLISH_CHOICE.search(_plain(response))
    return _compared(match and match[1], _plain(answer).strip())


def is_multilingual_choice(answer: str, response: str) -> Compared:
    """Whether the first word for it that the response has is followed by the record's letter, in any of the scripts."""
    text = _plain(response)
    match = next(filter(None, (choice.search(text) for choice in _CHOICE)), None)
    return _compared(match and match[1].translate(_LATIN), answer.strip())


def _compared(found: str | None, wanted: str) -> Compared:
    return found == wanted, found


def _plain(text: str) -> str:
    for mark in _MARKUP:
        text = text.replace(mark, "")
    return text


def _normalized(answer: str) -> str:
    text = answer.rpartition("=")[2]
    for before, after in (*_REPLACED, *((unit, "") for unit in _UNITS)):
        text = text.replace(before, after)
    for pattern, kept in _UNWRAPPED:
        text = pattern.sub(kept, text)
    text = text.replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()
