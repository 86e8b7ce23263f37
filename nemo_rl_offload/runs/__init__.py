"""The folder of a run: configuration, checkpoints, manifests."""
