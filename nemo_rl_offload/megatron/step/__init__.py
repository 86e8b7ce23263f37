"""One step over the pipeline schedules: microbatches, losses, log-probabilities."""
