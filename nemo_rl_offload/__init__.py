"""Post-train larger models on the GPUs you have; see README.md."""
