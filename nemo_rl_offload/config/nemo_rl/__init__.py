"""NeMo-RL's configurations, read as they are: a table of its keys, and what each becomes here."""
