"""Templates that would run for ever or fill the memory are stopped; others render as the plain sandbox does."""

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from patience import within_patience

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.forms import BadRecordError
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer
from nemo_rl_offload.data.prompt_tokens import encode_prompt
from nemo_rl_offload.data.turns import ChatEncoder, encode_observation
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.bounded_template import RunawayTemplateError
from nemo_rl_offload.specs.chat_template import render_chat, variables_of

TALK: list[Mapping[str, object]] = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "yes"}]


def nested(text: str, inner: str, times: int, end: str) -> str:
    return text * times + inner + end * times


def repeated(first: str, again: str, last: str) -> str:
    return "{% set s = " + first + " %}" + again * 60 + "{{ " + last + " }}"


RUNAWAYS = {
    "loops": nested("{% for a in range(99999) %}", "", 3, "{% endfor %}"),
    "loops that do nothing": "{% for a in range(99999) if 0 %}{% endfor %}" * 100,
    "recursive loop": "{% for a in [[]] recursive %}{{ loop([[],[]]) }}{% endfor %}",
    "text in a loop": "{% for a in range(99999) %}" + "x" * 50_000 + "{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "callers": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + nested("{% call m() %}", "x", 15, "{% endcall %}") * 20,
    "times": "{{ 'a' * 10**9 }}",
    "times a variable": "{% set n = 10**9 %}{{ n * [1] }}",
    "times minus": "{{ ('a' * 99999) * (0 - 1) }}" + "{{ 'a' * 99999999 }}",
    "power": "{{ (9 ** 9) ** (9 ** 9) }}",
    "squares": "{% set x = namespace(v=9) %}{% for i in range(60) %}{% set x.v = x.v * x.v %}{% endfor %}",
    "joined": repeated("'aa'", "{% set s = s ~ s %}", "s"),
    "added": repeated("'aa'", "{% set s = s + s %}", "s"),
    "set blocks": repeated("'aa'", "{% set s %}{{ s }}{{ s }}{% endset %}", "s"),
    "lists": repeated("[1]", "{% set s = [s, s] %}", "s"),
    "tuples": repeated("(1,)", "{% set s = (s, s) %}", "{s: 1}"),
    "mappings": repeated("{}", "{% set s = dict(a=s, b=s) %}", "s|tojson"),
    "percent": "{{ '%999999999d' % 1 }}",
    "percent and star": "{{ '%*d' % (999999999, 1) }}",
    "percent as a filter": "{{ '%999999999d'|format(1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format by a variable": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    **{
        name: "{{ 'a\t'.NAME(999999999) }}".replace("NAME", name) for name in ("center", "ljust", "zfill", "expandtabs")
    },
    "bytes": "{{ (5).to_bytes(999999999, 'big') }}",
    "replace": "{% set s = 'a' * 99999 %}{{ s.replace('a', s) }}",
    "replace nothing": "{% set s = 'a' * 99999 %}{{ s.replace('', s) }}",
    "replace as a filter": "{% set s = 'a' * 99999 %}{{ s|replace('a', s) }}",
    "join": "{% set s = 'a' * 99999 %}{{ s.join(['a'] * 99999) }}",
    "join as a filter": "{% set s = 'a' * 99999 %}{{ range(99999)|join(s) }}",
    "translate": "{{ ('a' * 9999).translate({97: 'a' * 99999}) }}",
    "sum": "{% set l = [[1] * 9999] * 9999 %}{{ l|sum(start=[]) }}",
    "indent": "{{ ('a\n' * 99999)|indent(99999) }}",
    "tojson": "{{ [[[[1]]]]|tojson(indent=99999) }}",
    "wordwrap": "{{ ('a ' * 99999)|wordwrap(1, wrapstring='b' * 9999) }}",
    "round": "{{ 1.5|round(999999999, 'ceil') }}",
    "slice": "{{ 'abc'|slice(999999999)|list }}",
    "batch": "{{ 'abc'|batch(999999999, 'x')|list }}",
    "map": "{{ range(99999)|map('string')|map('center', 9999)|join }}",
    **{
        f"searching: {expression}": "{% set r = range(5000) %}{% set l = r|list %}"
        "{% set m = l + [0] %}{% set n = l + [1] %}"
        "{% set v = {'a': m}.values() %}{% set s = ('a' * 100) * 500 %}{% set t = 'b' + s[1:] %}"
        "{% set w = ('b' * 100) * 500 ~ 'a' %}{% for i in range(2000) %}{% set x = EXPRESSION %}{% endfor %}".replace(
            "EXPRESSION", expression
        )
        for expression in (
            *("0.5 in r", "0.5 not in r", "-1 in l", "'b' in s", "m == n", "m != n", "m < n", "n in v", "s is lower"),
            *("0.5 is in(r)", "-1 is in(l)", "m is eq(n)", "[0.5]|select('in', r)|list", "-1 in r|reverse"),
            *("r.count(0.5)", "l.count(0)", "l.index(4999)", "s.count('b')", "s.find('b')", "s.rfind(t)", "s.strip(w)"),
            *("r|max", "r|min", "r|sum", "r|reverse|max"),
        )
    },
    "arguments": "{% for i in range(50000) %}{% set x = loop.cycle(*range(100000)) %}{% endfor %}",
    "searching in a row": "{% for i in range(50000) %}{% if "
    + " or ".join(["0.5 in range(100000)"] * 20)
    + " %}{% endif %}{% endfor %}",
    **{
        f"wide: {expression}": "{% set a = ('a' * 100) * 300 %}{% set n = namespace(a=a) %}{% set c = cycler(a) %}"
        "{% set x = EXPRESSION %}".replace("EXPRESSION", expression)
        for expression in (
            *(
                "('{a:99999}' * 10000).format(a='b')",
                "('%(a)99999s' * 10000) % {'a': 'b'}",
                "'{:{w}}'.format('a', w='9' * 9)",
            ),
            *("'{:{w}}'.format('a', w='999999999')", "'{0:{1}}'.format('a', '999999999')"),
            *("'{0:{1[w]}}'.format('a', {'w': 999999999})", "'{:{w:0>9}}'.format('a', w=9999999)"),
            *(
                "('{a:99999}' * 10000).format_map({'a': 'b'})",
                "(('{a:99999}' * 10000)|e).format(a='b')",
                "['%999999999d']|format(1)",
            ),
            *(
                "(('{a:99999}' * 10000)|safe).format_map({'a': 'b'})",
                "('%99999s' * 10000).encode() % {}",
                "'%999999999d'.encode() % 1",
            ),
            *("('{.a}' * 10000).format(*([n] * 10000))", "('{0.current}' * 10000).format(c)", "[n] * 10000 ~ ''"),
            *("[1] * 20000 | tojson(indent=a)", "([1] * 20000)|tojson(indent=a)"),
            *("([1] * 20000)|tojson(separators=(a, ':'))", "([1] * 20000)|tojson(separators=[':', a]|reverse)"),
            *("([n] * 20000)|tojson(default=('{:99999}').format)", "([1] * 20000)|join([a])", "([1] * 20000)|join(a)"),
            *(
                "([1] * 20000)|reverse|join(a)",
                "a.join(([''] * 20000)|reverse)",
                "([1] * 20000)|join({'a': a}.values())",
            ),
            *(
                "[a]|replace('a', a)",
                "a|replace('a', [a])",
                "a|replace(new=a, old='a')",
                "a|replace(count=30000, new=a, old='a')",
                "a.encode().replace('a'.encode(), a.encode())",
            ),
            *(
                "('http://a.bc ' * 5000)|urlize(target='x' * 50000)",
                "('foo:a ' * 5000)|urlize(target=a, extra_schemes=['foo:'])",
            ),
            *(
                "('www.a.bc' ~ '(' * 80000 ~ ')' * 80000)|urlize",
                "(')' * 80000 ~ 'a)')|urlize",
                "('<>' * 150000)|striptags",
            ),
        )
    },
    "tojson of what is deep": "{% set n = namespace(a=[]) %}{% for i in range(150) %}{% set n.a = [n.a] %}{% endfor %}"
    "{% set x = ([n.a] * 400)|tojson(indent=100) %}",
    "slices": "{% set s = 'a' * 99999 %}" + "{% set s = s[:] %}" * 200,
}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("template", RUNAWAYS.values(), ids=RUNAWAYS)
def test_a_runaway_is_stopped(template: str) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within_patience():
        variables_of(template)
        with pytest.raises(RunawayTemplateError, match=r"chat_template: the template runs too long"):
            render_chat(template, TALK, {}, prompt=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 << 10


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        nested("{% if 1 %}", "", 2000, "{% endif %}"),
        nested("{% for a in [1] %}", "", 40, "{% endfor %}"),
        "{{ a }}" * 100_000,
    ],
    ids=range(4),
)
def test_a_template_that_cannot_be_compiled_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"is nested too deeply for a Jinja template|a chat template at most 65536"):
        variables_of(template)


EXPRESSIONS = (
    "{{ 3 * 'ab' }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 'x' ~ 1 ~ none ~ [1] }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ 1 + 2.5 }}",
    "{{ '%05.1f|%s' % (3.14159, 'a') }} {{ '{:>5}|{}'.format('a', 2) }} "
    "{{ 'a-b-c'.split('-')[-1] }} {{ ' a '.strip() }}",
    "{% for m in messages[::-1] %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{{ m.role|title }}{% endfor %}",
    "{% for k, v in {'a': 1, 'b': [2]}.items() %}{{ k }}={{ v }} {% else %}no{% endfor %}{{ dict(a=1)|tojson }}",
    "{% for x in range(9) if x is odd %}{{ x }}{% if loop.first %}!{% endif %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% set n = namespace(a=0) %}{% for i in range(5) %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}{{ [1,2]|sum }}",
    "{% macro f(a, b='z') %}<{{ a }}{{ b }}{{ caller() if caller else '' }}>{% endmacro %}"
    "{{ f(1) }}{% call f(2) %}x{% endcall %}",
    "{{ messages|map(attribute='role')|join(', ') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ 'a\nb'|indent(2) }} {{ 'abc'|replace('b', 'x')|upper|center(9) }} "
    "{{ [3,1,2]|sort|reverse|list }} {{ 1.55|round(1) }}",
    "{{ ['b','a']|unique|first }} {{ 'abc'[1:] }} {{ (1, 2)[0] }} {{ 'a' if false }} "
    "{{ missing|default('d') }} {{ none }}",
    "{% for a in [[1, [2]], 3] recursive %}{% if a is iterable %}{{ loop(a) }}{% else %}{{ a }}{% endif %}{% endfor %}",
    "{% set x %}in {{ 1 }}{% endset %}{{ x|trim }}{% filter upper %}abc{% endfilter %}"
    "{% with a = 3 %}{{ a }}{% endwith %}",
    "{{ 'a' in 'ab' }} {{ 1 not in [2] }} {{ 1 < 2 < 3 }} {{ missing in [1] }} {{ 'role' in messages[0] }} "
    "{{ messages == messages }} {{ 2 is in([1, 2]) }} {{ 3 in range(4) }} {{ [1, 1].count(1) }} {{ 'x' == 'x' }}",
    "{{ '{0[a]:>{w}}|{b!r:.2}|{{}}'.format({'a': 1}, w=5, b='xyz') }} {{ ('<{}>'|e).format('&') }} "
    "{{ '{a.b}'.format_map({'a': {'b': 2}}) }} {{ ('{:5}'|safe).format('<') }} {{ '%(a)5s' % {'a': 1} }}",
    "{{ [3, 1]|max }} {{ range(3)|sum }} {{ [1, 2]|join(['-']) }} {{ 'http://a.bc'|urlize(target='_blank') }} "
    "{{ '<b>a</b>'|striptags }} {{ {'a': [1]}|pprint }} {{ 'aa'|replace(new='b', old='a', count=1) }}",
    "{{ ['a','b','c']|batch(2, '-')|list }} {{ 'a b'|wordcount }} {{ {'a': {'b': 1}}.a.b }} "
    "{{ '<a>'|e }} {{ 'x'|string }}",
)


@pytest.mark.parametrize("template", EXPRESSIONS)
def test_others_render_as_the_plain_sandbox_does(template: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.filters["tojson"] = lambda value: __import__("json").dumps(value, ensure_ascii=False)
    given: dict[str, Any] = {"messages": list(TALK), "tools": None, "documents": None, "add_generation_prompt": True}
    assert render_chat(template, TALK, {}, prompt=True) == plain.from_string(template).render(**given)


def test_the_allowance_grows_with_the_conversation() -> None:
    template = (
        "{% for m in messages %}{% for n in messages %}{{ m.content.split('</think>')[-1].strip() if loop.first }}"
        "{% endfor %}{{ m.content|replace('<|end|>', '')|trim ~ '\n' }}{% endfor %}"
    )
    long = [{"role": "user", "content": "word " * 1000}] * 100
    assert len(render_chat(template, long, {}, prompt=False)) > 1_000_000 - 1000
    huge = [{"role": "user", "content": "word " * 400_000}]
    assert len(render_chat(template, huge, {}, prompt=False)) > 3_900_000


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


def test_everything_that_renders_is_stopped(tmp_path: Path) -> None:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")
    tokenizer, end_ids = load_policy_tokenizer(config["policy"], None)
    encoder = ChatEncoder(tokenizer, None, end_ids)
    tokenizer.chat_template = ENDLESS
    talk: list[Any] = [dict(each) for each in TALK]
    with pytest.raises(RunawayTemplateError):
        encode_prompt(tokenizer, None, "hi")
    try:
        with pytest.raises(RunawayTemplateError):
            encoder(talk)
    except BadRecordError:
        pytest.fail("each record would take as long")
    with pytest.raises(RunawayTemplateError):
        encode_observation(tokenizer, None, [*talk, {"role": "user", "content": "on"}], end_ids[0])
    config["policy"]["tokenizer"]["chat_template"] = ENDLESS
    with pytest.raises(RunawayTemplateError):
        load_policy_tokenizer(config["policy"], None)
