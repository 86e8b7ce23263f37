from nemo_rl_offload.offload.stats import ModuleStats, OffloadStats


def test_printed_totals_are_a_short_table() -> None:
    modules = {"core_attn": ModuleStats(bytes_out=5 << 10, bytes_in=4 << 10)}
    found = OffloadStats(bytes_out=3 << 20, peak_host_bytes=1 << 30, copy_ms=100, stall_in_ms=2, per_module=modules)
    assert str(found).splitlines() == [
        "offloaded              3.00 MiB out, 0 B in",
        "  core_attn            5.00 KiB out, 4.00 KiB in",
        "host memory            0 B now, 1.00 GiB at most",
        "waits for copies       0.0 ms out, 2.0 ms in",
        "copies behind compute  98.0%",
    ]
    assert str(OffloadStats(denied_bytes=1, demand_reloads=2)).splitlines()[2:] == [
        "no room on the host  1 B",
        "reloads on demand    2",
    ]
