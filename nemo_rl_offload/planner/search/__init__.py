"""What to offload and recompute for a budget."""
