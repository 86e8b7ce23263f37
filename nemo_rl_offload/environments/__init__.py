"""Environments that turn responses into rewards, as Ray actors."""
