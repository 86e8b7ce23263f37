"""Benchmarks that the command line runs: what offloading costs and saves on this machine."""
