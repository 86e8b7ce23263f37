"""A training step, simulated: stages, schedule, lanes."""
