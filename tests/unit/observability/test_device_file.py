"""`doctor --write-device FILE`, and what `plan --gpu FILE` makes of it."""

import errno
import types
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl_offload.cli import command_line as cli
from nemo_rl_offload.observability import device_file
from nemo_rl_offload.observability.topology import Gpu, read_gpus
from nemo_rl_offload.specs.devices import DEVICES, find_device
from nemo_rl_offload.units import GIB

RATES = [{"out": 51.26, "in": 52.0, "both ways": 90.0}, {"out": 53.0, "in": 49.94, "both ways": 90.0}]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[types.SimpleNamespace]:
    """A machine with two GPUs, whose properties may be changed."""
    found = [types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=gib * GIB) for gib in (80, 79)]
    monkeypatch.setattr(device_file, "read_gpus", lambda: ([Gpu(0), Gpu(1)], ""))
    monkeypatch.setattr(device_file, "measure_link", lambda index: RATES[index])
    monkeypatch.setattr(device_file, "free_host_bytes", lambda: 640 * GIB)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(found))
    monkeypatch.setattr("torch.cuda.get_device_properties", found.__getitem__)
    return found


@pytest.mark.usefixtures("two_gpus")
def test_plan_reads_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    device_file.write_device_file(path)
    assert find_device(str(path)) == replace(
        DEVICES["h100-80gb"],
        name="here",
        memory_gib=79.0,
        link_out_gb_per_s=51.3,
        link_in_gb_per_s=49.9,
        host_memory_gib=320.0,
        devices_per_node=2,
    )
    assert path.read_text().startswith(
        "# NVIDIA H100 80GB HBM3, measured by `nemo-rl-offload doctor`.\nlike: h100-80gb\n"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("here.txt", "name a .yaml file, by which `plan --gpu` tells it from a device's name."),
        ("nowhere/here.yaml", "cannot be written: No such file or directory. Name another file."),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_a_file_that_cannot_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str) -> None:
    assert cli.main(["doctor", "--write-device", str(tmp_path / name)]) == cli.EXIT_USER_ERROR
    assert capsys.readouterr().err == f"error: --write-device {tmp_path / name}: {words}\n"


@pytest.mark.usefixtures("two_gpus")
def test_a_file_that_could_not_be_replaced_is_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "here.yaml"
    path.write_text("like: h100-80gb\n")
    monkeypatch.setattr("os.replace", fail)
    assert cli.main(["doctor", "--write-device", str(path)]) == cli.EXIT_USER_ERROR
    assert f"Cannot write {path}: No space left on device." in capsys.readouterr().err
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("here.yaml", "like: h100-80gb\n")]


def test_a_gpu_that_the_planner_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_gpus: list[types.SimpleNamespace]
) -> None:
    two_gpus[1].name = "NVIDIA T4"
    assert cli.main(["doctor", "--write-device", str(tmp_path / "here.yaml")]) == cli.EXIT_USER_ERROR
    assert "the device NVIDIA T4 is not among the known: a100-40gb, " in capsys.readouterr().err


@pytest.mark.parametrize("why", ["no memory on the device\nand a trace", "NVML lists"])
@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_cannot_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def fail(index: int) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(device_file, "measure_link", fail)
    if why == "NVML lists":
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert cli.main(["doctor", "--write-device", str(tmp_path / "here.yaml")]) == cli.EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert why.splitlines()[0] in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_file, "read_gpus", lambda: ([], "NVML lists none"))
    path = tmp_path / "here.yaml"
    assert cli.main(["doctor", "--write-device", str(path)]) == cli.EXIT_USER_ERROR
    output = capsys.readouterr()
    assert output.err == f"error: --write-device {path}: there is no GPU to measure (NVML lists none).\n"
    assert (output.out, path.exists()) == ("", False)


@pytest.mark.cuda
@pytest.mark.skipif(not read_gpus()[0], reason="needs a GPU")
def test_this_machines_gpu_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.yaml"
    cli.main(["doctor", "--write-device", str(path)])
    assert capsys.readouterr().out.endswith(f"Wrote {path}\n")
    assert find_device(str(path)).link_out_gb_per_s > 0.1
