"""Backends that generate responses."""
