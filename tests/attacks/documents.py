"""Every kind of file that the program reads, in every shape that a file can have.

    python tests/attacks/documents.py [--cases N] [--seed S] [--only TEXT]

The commands that read a file are called with it in a child process, one after another, with a limit on memory. The
attack succeeds where something else is raised than a message for the user, where a message does not name the file, or
where a call takes more than `PATIENCE_S` or `MAX_EXTRA_MB`.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from patience import within_patience

MAX_EXTRA_MB = 300
"""Loose, for the collector of garbage."""
ADDRESS_SPACE = 4 << 30
PROJECT = Path(__file__).resolve().parents[2]
MODEL = PROJECT / "examples/models/tiny_speller"
TINY = PROJECT / "examples/configs/sft_tiny.yaml"
DIGITS = "1" * 5000
HUGE_BYTES = 300 << 20

JSON_SHAPES: dict[str, bytes | None] = {
    "empty": b"",
    "blank": b" \n ",
    "null": b"null",
    "list": b"[]",
    "number": b"3",
    "text": b'"a"',
    "true": b"true",
    "cut": b'{"a": [1,',
    "deep_lists": b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep_objects": b'{"a": ' * 10_000 + b"1" + b"}" * 10_000,
    "deep_500": b'{"a": ' * 500 + b"1" + b"}" * 500,
    "deep_open": b"[" * 1_000_000,
    "digits": b'{"model_type": "llama", "vocab_size": ' + DIGITS.encode() + b', "step": ' + DIGITS.encode() + b"}",
    "latin": b'{"a": "\xe9"}',
    "utf16": '{"a": 1}'.encode("utf-16"),
    "nul": b'{"a": "\0"}',
    "nuls": b"\0" * 1000,
    "mark": b'\xef\xbb\xbf{"a": 1}',
    "twice": b'{"a": 1, "a": 2}',
    "many": b'{"a": [' + b"[]," * 6_000_000 + b"1]}",
    "huge": None,
    "nan": b'{"a": NaN, "b": 1e999, "c": -1e999}',
}


def _doubled(first: str, following: Callable[[str], str], depth: int) -> str:
    names = [f"k{number}" for number in range(depth)]
    return first.format(names[0]) + "".join(
        f"{name}: {following(before)}\n".replace("NAME", name) for before, name in itertools.pairwise(names)
    )


YAML_SHAPES: dict[str, bytes | None] = {
    "empty": b"",
    "null": b"null",
    "list": b"- a\n- b\n",
    "number": b"3",
    "text": b"hello",
    "cut": b"a: [1, 2\nb: {",
    "deep_flow": b"a: " + b"[" * 10_000,
    "deep_closed": b"a: " + b"[" * 10_000 + b"]" * 10_000,
    "deep_block": "\n".join(" " * level + "a:" for level in range(1000)).encode(),
    "digits": f"policy: {{train_global_batch_size: {DIGITS}}}\nmemory_gib: {DIGITS}\nalgorithm: sft\n".encode(),
    "hexadecimal": f"policy: {{train_global_batch_size: 0x{DIGITS}}}\nmemory_gib: 0x{DIGITS}\n".encode(),
    "sixties": ("a: " + "1:" * 3000 + "1").encode(),
    "latin": b"a: \xe9",
    "utf16": "a: 1".encode("utf-16"),
    "nul": b"a: \0",
    "twice": b"a: 1\nb: 2\na: 3\n",
    "null_key": b"null: 1\n",
    "aliases": _doubled("{0}: &{0} [x, x, x, x]\n", lambda name: f"&NAME [{', '.join([f'*{name}'] * 9)}]", 12).encode(),
    "merges": _doubled(
        "{0}: &{0} {{x: 1}}\n", lambda name: f"&NAME {{<<: [{', '.join([f'*{name}'] * 9)}]}}", 12
    ).encode(),
    "keys": b"a: &a [*a]\n",
    "unknown_alias": b"a: *b\n",
    "objects": b"a: !!python/object/apply:os.system [id]\n",
    "paths": b"a: !!python/object/apply:pathlib.Path [b]\n",
    "wrong_tags": b"a: !!int x\nb: !!float y\nc: !!timestamp z\n",
    "wrong_truth": b"a: !!bool x\n",
    "wrong_bytes": b"a: !!binary x\n",
    "two": b"a: 1\n---\nb: 2\n",
    "set": b"a: !!set {b, c}\nd: !!omap [e: 1]\nf: !!pairs [g: 1]\n",
    "many": b"a: [" + b"1," * 400_000 + b"1]",
    "marks": b"? " * 300_000,
    "huge": None,
}
CONFIG_SHAPES: dict[str, bytes | None] = YAML_SHAPES | {
    "doubled": _doubled("{0}: aaaaaaaaaa\n", lambda name: f'"${{{name}}}${{{name}}}"', 40).encode(),
    "chained": _doubled("{0}: 1\n", lambda name: f"${{{name}}}", 400).encode(),
    "sections": _doubled("{0}: {{x: 1}}\n", lambda name: f"{{x: '${{{name}}}', y: '${{{name}}}'}}", 40).encode(),
    "products": _doubled("{0}: 9\n", lambda name: f"${{mul:${{{name}}},${{{name}}}}}", 40).encode(),
    "nested": f"a: {'${' * 5000}b{'}' * 5000}\n".encode(),
    "half_open": f"a: {'${' * 5000}\n".encode(),
    "circle": b"a: ${b}\nb: ${a}\n",
    "inherits_itself": b"defaults: FILE\n",
    "inherits_null": b"defaults: null\n",
    "inherits_nul": b'defaults: "a\\0b"\n',
    "path_with_nul": b'defaults: examples/configs/sft_tiny.yaml\npolicy: {model_name: "a\\0", tokenizer: {name: ""}}',
    "inherits_many": b"defaults: [" + b"examples/configs/base.yaml," * 300 + b"examples/configs/base.yaml]\n",
    "inherits_deep": b"defaults: [[a]]\n",
    "inherits_pipe": b"defaults: /dev/zero\n",
}
TEXT_SHAPES: dict[str, bytes | None] = {
    "latin": b"\xe9",
    "huge": None,
    "long": b"{{ messages }}" * 20_000,
    "loops": b"{% for a in range(99999) %}" * 10 + b"{% endfor %}" * 10,
    "doubled": b"{% set s = 'aa' %}" + b"{% set s = s ~ s %}" * 60 + b"{{ s }}",
    "power": b"{{ (10 ** 9) ** (10 ** 9) }}",
    "wide": b"{{ '%999999999d' % 1 }}",
    "calls": b"{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets": b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}",
    "blocks": b"{% if 1 %}" * 3000 + b"{% endif %}" * 3000,
}
LINE_SHAPES: dict[str, bytes | None] = {
    name: content if content is None else b"\n".join([b'{"step": 1, "prefix": "train", "metrics": {}}', content, b""])
    for name, content in JSON_SHAPES.items()
} | {"line": b"[" * (40 << 20), "zeros": b"\0" * (40 << 20)}
OVERRIDES = {
    "digits": f"policy.train_global_batch_size={DIGITS}",
    "deep": f"policy.model_name={'[' * 1000}{']' * 1000}",
    "open": f"policy.model_name={'[' * 50_000}",
    "long_list": f"policy.model_name=[{','.join('1' * 40_000)}]",
    "long_text": f"policy.model_name='{'x y ' * 30_000}'",
    "long_key": f"{'a.' * 50_000}b=1",
    "doubled": f"policy.model_name={'${policy.model_name}' * 3000}",
    "huge_number": "policy.max_total_sequence_length=" + "9" * 99,
    "unpaired": "policy.model_name=\udc80",
}


def _check(*overrides: str, file: Path = TINY) -> list[str]:
    return ["check", str(file), *overrides]


def _model_file(name: str) -> Callable[[Path, Path], list[str]]:
    def arguments(folder: Path, document: Path) -> list[str]:
        model = folder / "model"
        shutil.copytree(MODEL, model)
        (model / name).unlink(missing_ok=True)
        document.rename(model / name)
        return _check(f"policy.model_name={model}", f"policy.tokenizer.name={model}", "data.prompt_template=null")

    return arguments


def _run_file(name: str) -> Callable[[Path, Path], list[str]]:
    def arguments(folder: Path, document: Path) -> list[str]:
        run = folder / "run"
        run.mkdir()
        (run / "config.yaml").write_text("algorithm: sft\n")
        (run / "metrics.jsonl").write_text('{"step": 1, "prefix": "train", "metrics": {"loss": 1.0}}\n')
        (run / name).unlink(missing_ok=True)
        document.rename(run / name)
        return ["report", str(run)]

    return arguments


def _inherited(folder: Path, document: Path) -> list[str]:
    (folder / "top.yaml").write_text(f"defaults: {document.name}\n")
    return _check(file=folder / "top.yaml")


def _recorded(folder: Path, document: Path) -> list[str]:
    document.rename(folder / "summary.json")
    return ["plan", str(TINY), "--gpu", "h100", "--recorded-run", str(folder)]


KINDS: dict[str, tuple[str, dict[str, bytes | None], Callable[[Path, Path], list[str]]]] = {
    "configuration": ("it.yaml", CONFIG_SHAPES, lambda _, document: _check(file=document)),
    "inherited": ("it.yaml", CONFIG_SHAPES, _inherited),
    "device": ("it.yaml", YAML_SHAPES, lambda _, document: ["plan", str(TINY), "--gpu", str(document)]),
    "template": (
        "it.jinja",
        TEXT_SHAPES,
        lambda _, document: _check(f"policy.tokenizer.chat_template={document}", "data.prompt_template=null"),
    ),
    "own_template": ("it.jinja", TEXT_SHAPES, _model_file("chat_template.jinja")),
    "recorded": ("it.json", JSON_SHAPES, _recorded),
    "run_config": ("it.yaml", YAML_SHAPES, _run_file("config.yaml")),
    "metrics": ("it.jsonl", LINE_SHAPES, _run_file("metrics.jsonl")),
    "warnings": ("it.log", {"latin": b"\xe9", "huge": None}, _run_file("warnings.log")),
    **{
        name: ("it.json", JSON_SHAPES, _run_file(f"{name}.json")) for name in ("summary", "memory_trace")
    },
    **{
        name: ("it.json", JSON_SHAPES, _model_file(f"{name}.json"))
        for name in ("config", "generation_config", "tokenizer_config", "tokenizer", "special_tokens_map")
    },
}  # fmt: skip
NO_FILE_IS_NAMED = {"template", "own_template"}
"""Where a template is Jinja, the key is named."""


def cases() -> list[tuple[str, str]]:
    """Kinds and shapes; `fifo` and `folder` are no plain files."""
    found = [(kind, shape) for kind, (_, shapes, _) in KINDS.items() for shape in [*shapes, "fifo", "folder"]]
    return [*found, *(("override", shape) for shape in OVERRIDES)]


def _attacked(kind: str, shape: str, folder: Path) -> dict[str, Any]:
    """Call the program; what came of it."""
    from nemo_rl_offload.cli.command_line import main

    if kind == "override":
        arguments = _check(OVERRIDES[shape])
        name = ""
    else:
        name, shapes, place = KINDS[kind]
        document = folder / name
        content = shapes.get(shape)
        if shape == "fifo":
            os.mkfifo(document)
        elif shape == "folder":
            document.mkdir()
        elif content is None:
            document.touch()
            os.truncate(document, HUGE_BYTES)
        else:
            document.write_bytes(content.replace(b"FILE", name.encode()))
        arguments = place(folder, document)
    out, err = io.StringIO(), io.StringIO()
    begin, code, raised = time.process_time(), -1, ""
    try:
        with (
            within_patience(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            code = main(arguments)
    except BaseException:  # noqa: BLE001 - what is looked for
        raised = traceback.format_exc()[-600:]
    seconds = time.process_time() - begin
    mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"code": code, "raised": raised, "err": err.getvalue()[-2000:], "seconds": seconds, "mb": mb}


def _child(folder: Path) -> None:
    """Take cases from standard input, and answer on standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    answers = os.fdopen(os.dup(1), "w")
    OVERRIDES["nothing"] = "policy.train_global_batch_size=128"
    _attacked("override", "nothing", folder)  # what is imported once is in no case's account
    print(json.dumps({"mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}), file=answers, flush=True)
    for line in sys.stdin:
        kind, shape = json.loads(line)
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            print(json.dumps(_attacked(kind, shape, Path(inner))), file=answers, flush=True)


def harm_of(kind: str, shape: str, found: dict[str, Any], before_mb: int) -> Iterator[str]:
    """What a case did that it must not."""
    if found["raised"] or "Traceback" in found["err"]:
        yield f"raised {found['raised'] or found['err']}"
    elif found["code"] not in (0, 2):
        yield f"code {found['code']}: {found['err']}"
    elif found["code"] == 2 and kind not in NO_FILE_IS_NAMED and kind != "override":
        names = {
            Path(KINDS[kind][0]).name,
            f"{kind}.json",
            "metrics.jsonl",
            "config.yaml",
            "warnings.log",
            "top.yaml",
            "summary.json",
            "/run:",
        }
        if not any(name in found["err"] for name in names):
            yield f"names no file: {found['err']}"
    if len(found["err"]) >= 2000:
        yield f"too long a message: {found['err'][:200]}"
    if found["mb"] - before_mb > MAX_EXTRA_MB:
        yield f"took {found['mb'] - before_mb} MB"


def attack(chosen: list[tuple[str, str]], folder: Path, *, says: bool = False) -> list[str]:
    """What succeeded, one line each."""
    path = os.pathsep.join(filter(None, [str(PROJECT), *sys.path]))
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--child", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    harm = []
    try:
        mb = json.loads(child.stdout.readline())["mb"]
        for kind, shape in chosen:
            print(json.dumps([kind, shape]), file=child.stdin, flush=True)
            if not (answer := child.stdout.readline()):
                harm.append(f"{kind}, {shape}: ended the process")
                break
            found = json.loads(answer)
            harm += [f"{kind}, {shape}: {text}" for text in harm_of(kind, shape, found, mb)]
            mb = max(mb, found["mb"])
            if says:
                said = (found["err"].strip() or "-").splitlines()[-1][:150]
                print(f"{kind:18} {shape:14} {found['code']:2} {found['seconds']:5.2f} s {found['mb']:5} MB {said}")
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    return harm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, metavar="N", help="a sample instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds with this in their name")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        _child(options.child)
        return 0
    chosen = [case for case in cases() if options.only in case[0]]
    if options.cases is not None:
        chosen = Random(options.seed).sample(chosen, min(options.cases, len(chosen)))
    with tempfile.TemporaryDirectory() as folder:
        harm = attack(chosen, Path(folder), says=True)
    print("\n".join(harm))
    print(f"{len(chosen)} documents, {len(harm)} did harm")
    return bool(harm)


if __name__ == "__main__":
    sys.exit(main())
