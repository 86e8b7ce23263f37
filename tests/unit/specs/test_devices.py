from pathlib import Path

import pytest

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.devices import DEVICES, find_device, recognise


@pytest.mark.parametrize("name", [*DEVICES, "H100", "h200", "b200", "gb200", "a100", "l40s"])
def test_known_devices(name: str) -> None:
    device = find_device(name)
    assert device.name.startswith(name.lower())
    assert 0 < device.achieved < 1
    assert device.memory_bytes < float(device.name.split("-")[1].removesuffix("gb")) * 1e9 * 1.075


def test_an_unknown_device_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--gpu h100-80g: unknown device\. Did you mean 'h100-80gb'\?"):
        find_device("h100-80g")


def test_measurements_replace_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: h100\nlink_out_gb_per_s: 51.5\nachieved: 0.3\n")
    device = find_device(str(path))
    assert (device.name, device.link_out_gb_per_s, device.achieved) == ("mine", 51.5, 0.3)
    assert device.bf16_tflops == find_device("h100").bf16_tflops


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("like: h100\nlink_out_gb: 3", "link_out_gb: unknown key. Did you mean 'link_out_gb_per_s'?"),
        ("like: h100\nachieved: fast", "achieved: 'fast' is not a positive number"),
        ("like: h100\nmemory_gib: -1", "memory_gib: -1 is not a positive number"),
        ("memory_gib: 80", "missing: bf16_tflops, fp8_tflops"),
        ("like: h100\nachieved: 38", "achieved: 38 is a share of the peak rate: at most 1"),
        ("like: h100\ndevices_per_node: 2.5", "devices_per_node: 2.5 is not a whole number"),
        ("like: h100\nname: [1]", "name: [1] is not a name"),
        ("like: h100\nmemory_gib: .inf", "memory_gib: inf is not a positive number"),
        ("like: h100\nhost_memory_gib: 1.0e+300", "host_memory_gib: 1e+300 is not a positive number, from 1e-06 to"),
        ("like: h100\nachieved: 1.0e-300", "achieved: 1e-300 is not a positive number, from 1e-06 to 1e+09."),
        ("like: h100\nmemory_gib: .nan", "memory_gib: nan is not a positive number"),
        ("like: h1000", "like: h1000: unknown device. Did you mean 'h100'?"),
        ("like: mine.yaml", "like: mine.yaml: unknown device"),
        ("- h100", "must hold 'key: value' lines"),
        ("like: [", "cannot be read"),
    ],
)
def test_a_damaged_file_is_told_the_fix(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        find_device(str(path))
    assert words in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        find_device(str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize(
    ("driver_name", "memory_gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100-80gb"),
        ("NVIDIA H200", 140, "h200-141gb"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79, "a100-80gb"),
        ("NVIDIA L40S", 44, "l40s-48gb"),
        ("NVIDIA GB200", 184, "gb200-186gb"),
    ],
)
def test_the_drivers_names_are_recognised(driver_name: str, memory_gib: int, name: str) -> None:
    assert recognise(driver_name, memory_gib << 30).name == name


def test_another_device_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match="NVIDIA GeForce RTX 4090 is not among the known"):
        recognise("NVIDIA GeForce RTX 4090", 24 << 30)
