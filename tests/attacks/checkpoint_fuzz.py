"""Damaged and hostile checkpoints: each is refused with one message, or loads exactly what was saved.

`python tests/attacks/checkpoint_fuzz.py --cases 1000` changes a copy of a small checkpoint in one way after another
(`CASES`): bytes, lengths and names of files, the manifest, and the pickles and archives themselves, in most cases with
a manifest that fits. Whoever rewrites the manifest and makes an archive of other numbers has made another checkpoint,
which no reader can tell from one that was saved; such cases are counted apart. What must never be: a raw error, a wait,
a file that appears or changes outside of the checkpoint, or the canary that every piece of code here would make.
"""

import argparse
import io
import json
import logging
import os
import pickle
import random
import resource
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from patience import PATIENCE_S, within_patience

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import NemoRLOffloadError
from nemo_rl_offload.losses.nll import NegativeLogLikelihood
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.megatron.checkpoint import distributed
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.runs.manifest import file_digest
from nemo_rl_offload.runs.run_directory import CONFIG_FILE, POLICY, Checkpoints, loop_state, read_checkpoint

MODEL = PROJECT_ROOT / "examples/models/tiny_speller"
CONFIG = PROJECT_ROOT / "examples/configs/sft_tiny.yaml"
GADGETS = (
    *("os.system", "posix.system", "nt.system", "os.popen", "subprocess.Popen", "subprocess.call", "pty.spawn"),
    *("builtins.exec", "builtins.eval", "builtins.open", "builtins.getattr", "builtins.__import__", "builtins.print"),
    *("__builtin__.eval", "functools.partial", "functools.reduce", "operator.methodcaller", "operator.attrgetter"),
    *("importlib.import_module", "runpy.run_path", "timeit.timeit", "cProfile.run", "code.interact", "pdb.run"),
    *("pathlib.Path.touch", "pathlib.PosixPath", "shutil.copy", "os.mkdir", "io.FileIO", "_io.FileIO", "_io.BytesIO"),
    *("torch.load", "torch.serialization.load", "torch.hub.load", "torch.jit.load", "torch.ops.load_library"),
    *(
        "torch.storage._load_from_bytes",
        "torch._utils._rebuild_wrapper_subclass",
        "torch._tensor._rebuild_from_type_v2",
    ),
    *("torch.jit.unsupported_tensor_ops.execWrapper", "numpy.load", "numpy.core.multiarray._reconstruct"),
    *("numpy.testing._private.utils.runstring", "pickle.loads", "_pickle.loads", "copyreg._reconstructor"),
    *("types.FunctionType", "types.CodeType", "ctypes.CDLL", "webbrowser.open", "multiprocessing.Process"),
    *("torch.distributed.checkpoint.metadata.Metadata.__init__", "torch.nn.Module", "torch.Size.__class__"),
)

type Change = Callable[["Case"], bool | None]
"""Changes the checkpoint; true where the result is another one, whose values are its own."""
CASES: list[Change] = []


class Case:
    """A copy of the checkpoint, and a source of chance."""

    def __init__(self, folder: Path, other: Path, outside: Path, rng: random.Random) -> None:
        self.folder, self.other, self.outside, self.rng = folder, other, outside, rng
        self.canary = outside / "canary"

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())

    def file(self, *names: str) -> Path:
        return self.rng.choice([path for path in self.files if not names or path.name.endswith(names)])

    def fit(self) -> None:
        """Rewrite the manifest."""
        names = [path for path in self.files if path.name != "manifest.json"]
        digests = {str(path.relative_to(self.folder)): file_digest(path) for path in names}
        (self.folder / "manifest.json").write_text(json.dumps(digests))

    def gadget(self) -> bytes:
        """A program that makes the canary if its name can be called, in one of the forms that pickles have."""
        full = self.rng.choice(GADGETS)
        module, _, name = full.rpartition(".")
        text = f"touch {self.canary}" if "system" in full or "open" in name else f"open({str(self.canary)!r}, 'w')"
        argument = pickle.BINUNICODE + struct.pack("<I", len(text)) + text.encode()
        by_line = f"c{module}\n{name}\n".encode()
        by_stack = b"".join(pickle.SHORT_BINUNICODE + bytes([len(part)]) + part.encode() for part in (module, name))
        return self.rng.choice(
            [
                by_line + argument + b"\x85R",
                by_stack + b"\x93" + argument + b"\x85R",
                by_line + b"(" + argument + b"tR",
                b"(" + argument + f"i{module}\n{name}\n".encode(),
                b"(" + by_line + argument + b"o",
                by_line + argument + b"\x85\x81",
                by_line + argument + b"\x85}\x92",
                b"}" + by_line + argument + b"\x85Rb",
                by_line + argument + b"\x85RQ",
                b"P" + full.encode() + b"\n",
                b"\x82\x01",
                by_line,
            ]
        )


def case(change: Change) -> Change:
    CASES.append(change)
    return change


def flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 4, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@case
def flip(case: Case) -> None:
    path = case.file()
    path.write_bytes(flipped(path.read_bytes(), case.rng))


@case
def flip_and_fit(case: Case) -> None:
    path = case.file(".metadata", ".distcp", "metadata.json")
    path.write_bytes(flipped(path.read_bytes(), case.rng))
    case.fit()


@case
def flip_metadata_and_fit(case: Case) -> bool:
    path = case.folder / POLICY / ".metadata"
    path.write_bytes(flipped(path.read_bytes(), case.rng))
    case.fit()
    return True


@case
def truncate_or_extend(case: Case) -> None:
    path = case.file()
    content = path.read_bytes()
    longer = content + case.rng.randbytes(case.rng.randrange(1, 5000))
    path.write_bytes(case.rng.choice((b"", content[: case.rng.randrange(len(content))], longer)))
    if case.rng.random() < 0.5 and path.name != "manifest.json":
        case.fit()


@case
def swap(case: Case) -> None:
    one, two = case.rng.sample(case.files, 2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    if case.rng.random() < 0.5:
        case.fit()


@case
def take_from_another_step(case: Case) -> bool:
    path = case.file()
    path.write_bytes((case.other / path.relative_to(case.folder)).read_bytes())
    is_other = case.rng.random() < 0.5
    if is_other:
        case.fit()
    return is_other


@case
def rename(case: Case) -> None:
    path = case.file()
    name = case.rng.choice((path.name + "x", path.name.upper(), "common.pt", "__0_9.distcp", "x" * 200, "é\n"))
    path.rename(path.with_name(name))
    if case.rng.random() < 0.5:
        case.fit()


@case
def remove(case: Case) -> None:
    case.file().unlink()
    if case.rng.random() < 0.5:
        case.fit()


@case
def rewrite_json(case: Case) -> None:
    path = case.file(".json")
    document: Any = json.loads(path.read_text())
    odd = ("[]", "null", "", "3", '"a"', "{}", "[" * 100_000, '{"a": ' * 50_000, '{"a": ' + "1" * 5000 + "}", "\xff")
    key = case.rng.choice(list(document))
    value = case.rng.choice(
        (None, [], {}, "x", -1, 1e308, True, 10**30, [[]], {"bytes": 1}, {"bytes": "1", "sha256": 3})
    )
    text = case.rng.choice((*odd, json.dumps({**document, key: value}), json.dumps({**document, key + "x": value})))
    path.write_bytes(text.encode("latin-1"))
    if path.name != "manifest.json":
        case.fit()


@case
def name_outside(case: Case) -> None:
    path = case.folder / "manifest.json"
    names = (
        "../x",
        "/etc/passwd",
        "policy/../../../x",
        "",
        ".",
        "..",
        "policy",
        "policy/./.metadata",
        "a\0b",
        "a" * 5000,
    )
    manifest = json.loads(path.read_text())
    manifest[case.rng.choice((*names, str(case.outside / "precious")))] = file_digest(case.outside / "precious")
    path.write_text(json.dumps(manifest))


@case
def link(case: Case) -> None:
    path = case.file()
    if case.rng.random() < 0.3:
        path = case.folder / POLICY
    moved = case.outside / "moved"
    path.rename(moved)
    path.symlink_to(
        case.rng.choice((moved, case.outside / "precious", case.outside / "nothing", path, Path("/dev/zero")))
    )


@case
def no_file(case: Case) -> None:
    path = case.file()
    path.unlink()
    case.rng.choice((os.mkfifo, os.mkdir))(path)


def archive_of(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def replace_entry(case: Case, change: Callable[[str, bytes], bytes]) -> None:
    """Put another entry at the end of a part, and have `.metadata` and the manifest say so."""
    metadata = pickle.loads((case.folder / POLICY / ".metadata").read_bytes())
    index = case.rng.choice([*metadata.storage_data, *[i for i in metadata.storage_data if "state" in i.fqn][-3:] * 20])
    place = metadata.storage_data[index]
    path = case.folder / POLICY / place.relative_path
    content = path.read_bytes()
    entry = change(index.fqn, content[place.offset : place.offset + place.length])
    path.write_bytes(content + entry)
    place.offset, place.length = len(content), len(entry)
    (case.folder / POLICY / ".metadata").write_bytes(pickle.dumps(metadata))
    case.fit()


def mutated(program: bytes, case: Case) -> bytes:
    """A pickle with instructions that were put in, taken out, repeated, or replaced; often with a gadget."""
    at = case.rng.randrange(2, len(program))
    piece = case.rng.choice((case.gadget(), case.gadget() + b"0", case.rng.randbytes(case.rng.randrange(1, 9))))
    bomb = case.rng.choice(
        (b"r\xff\xff\xff\x7f", b"\x8e" + b"\x7f" * 8, b"\x8b\xff\xff\xff\x7f", b"(" * 10_000, b"2" * 100)
    )
    return case.rng.choice(
        (
            program[:2] + piece + program[2:],
            program[:at] + piece + program[at:],
            program[:-1] + piece + b".",
            program[:2] + piece + b".",
            program[:at] + program[at + case.rng.randrange(1, 30) :],
            program[:at] + program[at - case.rng.randrange(at) : at] + program[at:],
            program[:at] + bytes([case.rng.randrange(256)]) + program[at + 1 :],
            program[:2] + bomb + program[2:],
            program[:2] + b")" + b"2\x86" * 64 + b"}q\xff0h\xff" + program[2:],
        )
    )


@case
def mutate_metadata(case: Case) -> bool:
    path = case.folder / POLICY / ".metadata"
    path.write_bytes(mutated(path.read_bytes(), case))
    case.fit()
    return True


@case
def mutate_entry(case: Case) -> bool:
    def change(_name: str, entry: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(entry)) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
        members["archive/data.pkl"] = mutated(members["archive/data.pkl"], case)
        return archive_of(members)

    replace_entry(case, change)
    return True


@case
def replace_entry_by_another_format(case: Case) -> None:
    class Gadget:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {case.canary}",)

    def change(_name: str, _entry: bytes) -> bytes:
        stream = io.BytesIO()
        kind = case.rng.randrange(6)
        if kind == 0:
            torch.save(Gadget(), stream)
        elif kind == 1:
            torch.save(Gadget(), stream, _use_new_zipfile_serialization=False)
        elif kind == 2:
            stream.write(pickle.dumps(Gadget()))
        elif kind == 3:
            torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), stream)
        elif kind == 4:
            torch.save(torch.frombuffer(bytearray(pickle.dumps(Gadget())), dtype=torch.uint8), stream)
        else:
            inner = io.BytesIO()
            torch.save(Gadget(), inner)
            torch.save([{"model0": inner}, {"model0": {"x._extra_state": Gadget()}}], stream)
        return stream.getvalue()

    replace_entry(case, change)


@case
def damage_archive(case: Case) -> None:
    def change(_name: str, entry: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(entry)) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
        name = case.rng.choice(list(members))
        kind = case.rng.randrange(6)
        if kind == 0:
            del members["archive/data.pkl"]
        elif kind == 1:
            members |= {"other/data.pkl": members["archive/data.pkl"]}
        elif kind == 2:
            members |= {f"archive/data/{number}": b"" for number in range(5)}
        elif kind == 3:
            members["archive/byteorder"] = b"big"
        elif kind == 4:
            return flipped(archive_of(members), case.rng)
        else:
            stream = io.BytesIO()
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
                packed.writestr(name, bytes(1 << 20))
            return stream.getvalue()
        return archive_of(members)

    replace_entry(case, change)


@case
def edit_metadata(case: Case) -> bool:
    path = case.folder / POLICY / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index, place = case.rng.choice(list(metadata.storage_data.items()))
    other_place = case.rng.choice(list(metadata.storage_data.values()))
    names = (
        "../../x",
        "/etc/passwd",
        "",
        ".",
        "..",
        ".metadata",
        "__0_9.distcp",
        str(case.outside / "precious"),
        "a\0b",
    )
    kind = case.rng.randrange(8)
    if kind == 0:
        place.relative_path = case.rng.choice(names)
    elif kind == 1:
        place.offset = case.rng.choice((-1, 1, place.offset + 1, 1 << 62, 10**40, None, "1"))
    elif kind == 2:
        place.length = case.rng.choice((-1, 0, 1, place.length + 1, 1 << 62, None))
    elif kind == 3:
        place.transform_descriptors = case.rng.choice((["zstd"], "x", [os.system], 3))
    elif kind == 4:
        place.offset, other_place.offset = other_place.offset, place.offset
        place.length, other_place.length = other_place.length, place.length
    elif kind == 5:
        del metadata.storage_data[index]
    elif kind == 6:
        entry = metadata.state_dict_metadata[index.fqn]
        for name in ("size", "chunks", "properties"):
            if hasattr(entry, name) and case.rng.random() < 0.5:
                setattr(entry, name, case.rng.choice((None, [], torch.Size([1 << 40, 1 << 40]), torch.Size([]), "x")))
    else:
        metadata.state_dict_metadata["more"] = metadata.state_dict_metadata.pop(index.fqn)
    path.write_bytes(pickle.dumps(metadata))
    case.fit()
    return True


@case
def former_format(case: Case) -> None:
    path = case.folder / POLICY / "common.pt"
    path.write_bytes(b"\x80\x02" + case.gadget() + b".")
    if case.rng.random() < 0.5:
        case.fit()


class Fuzz:
    """Run directories with a checkpoint, and a model to read it into."""

    def __init__(self, root: Path) -> None:
        self.outside, self.run_dir = root / "outside", root / "run"
        self.outside.mkdir()
        config: Any = load_config(
            CONFIG,
            [f"policy.model_name={MODEL}", "policy.megatron_cfg.fine_grained_activation_offloading=false"],
        )
        self._model = build_model(config["policy"], MODEL, num_steps=6)
        self.run_dir.mkdir(parents=True)
        self._checkpoints = Checkpoints(self.run_dir, None, True)
        for step in (1, 2):
            _train(self._model, step)
            self._save(step)
        (self.run_dir / CONFIG_FILE).write_text(yaml.safe_dump(config))
        self.original = self.run_dir / "checkpoints" / "step_2"
        self._expected = [value.clone() for value in _values(self._model)]
        self.pristine = root / "pristine"
        shutil.copytree(self.original, self.pristine)

    def _save(self, step: int) -> None:
        manifest: list[distributed.Manifest] = []

        def write(folder: Path) -> None:
            folder.mkdir()
            manifest.append(distributed.save(self._model, folder))

        self._checkpoints.begin(step, write)
        state: Any = {
            "data": {"epoch": 0, "position": step},
            "validation": {"first": None, "last": None},
            "train": {"loss": 1.0},
            "validation_metrics": {},
            "num_skipped": 0,
        }
        self._checkpoints.commit(step, state, 0.5, manifest.pop)

    def restore(self) -> None:
        """Bring everything back to what it was."""
        for path in (self.original, self.outside):
            shutil.rmtree(path)
        shutil.copytree(self.pristine, self.original)
        self.outside.mkdir()
        (self.outside / "precious").write_text("mine")

    def change(self, number: int, seed: int) -> tuple[str, bool]:
        """Change the checkpoint in the way of a case; its name, and whether it is another checkpoint then."""
        rng = random.Random(f"{seed}/{number}")
        change = CASES[number % len(CASES)]
        other = self.run_dir / "checkpoints" / "step_1"
        is_other = change(Case(self.original, other, self.outside, rng))
        return change.__name__, bool(is_other)

    def load(self) -> bool:
        """Read the checkpoint as a resumed run does, into a model of other values; whether it has what was saved."""
        with torch.no_grad():
            for value in _values(self._model):
                value.zero_()
        found = read_checkpoint(self.original)
        loop_state(found)
        distributed.verify(found.folder / POLICY, found.policy_files)
        distributed.load(self._model, found.folder / POLICY)
        return all(map(torch.equal, _values(self._model), self._expected))

    def state_outside(self) -> dict[str, tuple[int, ...]]:
        """What stands outside of the checkpoint, but for what the case itself has moved there."""
        kept = [self.outside, self.run_dir / "checkpoints" / "step_1", self.run_dir / CONFIG_FILE]
        paths = [path for place in kept for path in (place.rglob("*") if place.is_dir() else [place])]
        return {str(path): _mark(path.stat()) for path in paths if path.exists()}


def _mark(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns if stat.S_ISREG(found.st_mode) else 0


def _values(model: MegatronModel) -> list[torch.Tensor]:
    tensors = [parameter.data for module in model.modules for parameter in module.parameters()]
    assert model.optimizer is not None
    for optimizer in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        for state in optimizer.optimizer.state.values():
            tensors += [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
    return tensors


def _train(model: MegatronModel, step: int) -> None:
    torch.manual_seed(step)
    batch = {
        "input_ids": torch.randint(0, 256, (2, 16)),
        "input_lengths": torch.full((2,), 16),
        "token_mask": torch.ones(2, 16),
        "sample_mask": torch.ones(2),
    }
    train_step(model, batch, NegativeLogLikelihood(), normalizers(batch), 2, LogitsHeadFactory(1.0))


def outcome_of(fuzz: Fuzz, number: int, seed: int) -> tuple[str, str]:
    """The name of a case, and `refused`, `same`, `other` or what is wrong."""
    fuzz.restore()
    name, is_other = fuzz.change(number, seed)
    before = fuzz.state_outside()
    try:
        with within_patience():
            result = "same" if fuzz.load() else "other"
    except NemoRLOffloadError as error:
        text = str(error)
        result = "refused" if "\n" not in text and "step_2" in text and len(text) < 2000 else f"unclear: {text[:500]}"
    except BaseException as error:  # noqa: BLE001 - any is a finding
        result = f"raw: {type(error).__name__}: {str(error)[:300]}"
    if result == "other" and not is_other:
        result = "other values were read"
    if fuzz.state_outside() != before:
        result = f"something changed outside: {sorted(set(fuzz.state_outside()) ^ set(before))} ({result})"
    return name, result


def run_cases(root: Path, num_cases: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How often each outcome was, and what went wrong. A process group of one rank has to be there."""
    fuzz, seen, wrong = Fuzz(root), Counter[str](), []
    fuzz.restore()
    assert fuzz.load(), "an unchanged checkpoint loads"
    base_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for number in range(num_cases):
        name, result = outcome_of(fuzz, number, seed)
        is_clean = result in ("refused", "same", "other")
        seen[f"other ({name})" if result == "other" else result if is_clean else "wrong"] += 1
        if not is_clean:
            wrong.append(f"case {number} ({name}): {result}")
    if (grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - base_bytes) > 1 << 30:
        wrong.append(f"the process grew by {grown >> 20} MiB")
    fuzz.restore()
    return seen, wrong


def run_exports(root: Path, numbers: range, seed: int) -> tuple[Counter[str], list[str]]:
    """The same with whole `export` commands, of a directory in which `run_cases` was."""
    fuzz, seen, wrong = Fuzz(root), Counter[str](), []
    for number in numbers:
        fuzz.restore()
        name, _ = fuzz.change(number, seed)
        before = fuzz.state_outside()
        out = root / f"exported{number}"
        command = [sys.executable, "-m", "nemo_rl_offload.cli", "export", str(fuzz.run_dir / "step_2"), str(out)]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        is_refused = done.returncode == 2 and len(errors) == 1 and not out.exists() and "Traceback" not in done.stderr
        seen[f"export: {'refused' if is_refused else 'done'}"] += 1
        if not is_refused and (done.returncode or not (out / "model.safetensors").exists()):
            wrong.append(f"export of case {number} ({name}): {done.returncode}: {done.stderr[-500:]}")
        if fuzz.state_outside() != before:
            wrong.append(f"export of case {number} ({name}): something changed outside")
    return seen, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--exports", type=int, default=0, help="whole commands as well, from the pickles on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with redirect_stdout(sys.stderr):
        seen, wrong = _run(options)
    counts = ", ".join(f"{outcome} {count}" for outcome, count in sorted(seen.items()))
    print("\n".join([*wrong, f"checkpoint_fuzz: {options.cases} cases, seed {options.seed}: {counts}"]))
    return int(bool(wrong))


def _run(options: argparse.Namespace) -> tuple[Counter[str], list[str]]:
    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

    install_cpu_support()
    from nemo_rl_offload.megatron.build.model import init_process_groups
    from nemo_rl_offload.megatron.runtime.rendezvous import join_alone

    join_alone("gloo")
    init_process_groups(load_config(CONFIG)["policy"], seed=0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").mkdir()
        seen, wrong = run_cases(Path(folder) / "a", options.cases, options.seed)
        if options.exports:
            (Path(folder) / "b").mkdir()
            first = CASES.index(mutate_metadata)
            more, also_wrong = run_exports(Path(folder) / "b", range(first, first + options.exports), options.seed)
            seen, wrong = seen + more, wrong + also_wrong
    return seen, wrong


if __name__ == "__main__":
    sys.exit(main())
