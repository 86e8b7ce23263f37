"""What models write as answers, and what each is worth: some of it hangs or crashes what reads it."""

from collections.abc import Callable

import pytest

from nemo_rl_offload.environments.interface import Episode
from nemo_rl_offload.environments.pool import EnvironmentPool

TIMEOUT_S = 4.0
"""Over ten times what the slowest right answer takes on an idle machine; a busy one has the same limit."""


def box(text: str) -> str:
    return rf"So it is $\boxed{{{text}}}$."


TAKES_TOO_LONG = (
    box("12345678!"),
    box("9^{9^{9^{9}}}"),
    box("10^{10^{10}}"),
    box("99999^{9999999}"),
    box(r"\binom{10000000}{5000000}"),
    box(r"\prod_{n=1}^{1000000} n"),
    box(r"\sin(" * 200 + "x" + ")" * 200),
    "(9**9**9**9)",
    "7 " * 60_000,
    r"\[" * 20_000,
)
"""To the reference 5; each is worth 0, and counted."""
WRONG = (
    box("(" * 500 + "5" + ")" * 500),
    box(r"\int_0^\infty \frac{\sin(x^3) e^{-x^2} \ln(1+x)}{x^5+x+1} dx"),
    box(r"\lim_{x\to 0}\frac{\sin(\tan x)-\tan(\sin x)}{x^7}"),
    box("7 " * 2_000),
    box("9" * 100_000),
    "9" * 1_000_000,
    box("1e999999999"),
    "1e999999999",
    box("x^{1000000}-1"),
    box("}" * 1_000),
    r"\boxed{" * 5_000,
    r"\boxed{",
    r"\boxed{}",
    "$" * 20_001,
    "(" * 20_000,
    "1," * 20_000,
    " " * 1_000_000,
    "\x00" * 10_000,
    box("\ud800"),
    "",
    "no number here",
    box(r"\frac{" * 200),
    box(r"\text{" * 500),
    box(r"\begin{pmatrix} 7 & 7 \\ 7"),
    box(r"\begin{pmatrix}" + ("1&" * 30 + r"1\\") * 30 + r"\end{pmatrix}"),
    box("1/0"),
    box("0^{-1}"),
    box(r"\infty-\infty"),
    box("__import__('os')._exit(0)"),
    "__import__('os')._exit(0)",
    box("\u0665"),
    box("4.9999"),
    box(r"5\%") + " " + box(r"\text{five}"),
    box("5") + " No: " + box("6"),
    "<think>" + box("5"),
)
"""To the reference 5."""
RIGHT = (
    ("5", box("5" + "\x00")),
    ("5", "\ud83d" * 1_000 + box("5")),
    ("5", box("4") * 5_000 + box("5")),
    ("5", r"\boxed{" * 5_000 + "5" + "}" * 5_000),
    ("5", box(r"5\text{ cm}^2")),
    ("5", box(r"\$5.00")),
    ("5", "The answer is 5 apples."),
    ("50", box(r"50\%")),
    (r"\frac{3}{2}", box(r"1\frac{1}{2}")),
    (r"\frac{3}{2}", box("1.5")),
    ("1,234,567", box("1234567")),
    ("10000", box("10000!/9999!")),
    (r"\{1,2,3\}", box("3, 1, 2")),
    (r"\{1,2\}", box(r"\{2,1\}")),
    ("[0,1)", box("[0,1)")),
    (r"(-\infty,3)\cup(5,\infty)", box(r"(-\infty, 3) \cup (5, \infty)")),
    ("x=5", box("5")),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", box(r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}")),
    (r"\text{Thursday}", box(r"\text{Thursday}")),
    ("(B)", box(r"\text{B}")),
    ("2+3i", box("3i+2")),
    (r"90^\circ", box("90")),
    (r"\frac{\sqrt{2}}{2}", box(r"\frac{1}{\sqrt{2}}")),
    ("x^2+2x+1", box("(x+1)^2")),
    (r"\binom{5}{2}", box("10")),
    ("5", "<think>" + box("12345678!") + "</think>" + box("5")),
)
NOT_EQUAL = (
    (r"\frac{1}{3}", box("0.33")),
    ("(1,2)", box("(2,1)")),
    ("[0,1)", box("[0,1]")),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", box(r"\begin{pmatrix}1&3\\2&4\end{pmatrix}")),
    (r"\text{Thursday}", box(r"\text{Friday}")),
    ("9^{9^{9^{9}}}", box("5")),
)


@pytest.mark.sampled
@pytest.mark.slow
def test_hard_answers(make_pool: Callable[..., EnvironmentPool]) -> None:
    """Each has its score, whatever came before it, and all of them within their limits."""
    pool = make_pool("data.env_name=math", f"env.math.timeout_s={TIMEOUT_S}", "env.math.num_workers=2")
    expected = [
        *(("5", response, 0.0, True) for response in TAKES_TOO_LONG),
        *(("5", response, 0.0, None) for response in WRONG),
        *((answer, response, 1.0, False) for answer, response in RIGHT),
        *((answer, response, 0.0, None) for answer, response in NOT_EQUAL),
    ]
    assert len(expected) >= 70
    # In turn, so that each process meets right ones after those that end it.
    mixed = sorted(range(len(expected)), key=lambda index: index % 7)
    asked = [
        Episode({"answer": expected[index][0]}, [{"role": "assistant", "content": expected[index][1]}])
        for index in mixed
    ]
    mistaken = []
    for index, score in zip(mixed, pool.step(asked), strict=True):
        answer, response, reward, is_error = expected[index]
        if score.reward != reward or is_error not in (None, score.scorer_error):
            mistaken.append((answer, response[:80], score))
    assert mistaken == []
    late = [text for text in pool.notices() if f"took longer than timeout_s {TIMEOUT_S:g}." in text]
    assert len(late) == 1
