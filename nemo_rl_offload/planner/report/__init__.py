"""A plan for people and programs."""
