"""Ray: the virtual cluster (which workers run where) and the worker group (one actor a rank)."""
