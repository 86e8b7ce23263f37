"""Environments that turn responses into rewards, in processes of their own."""
