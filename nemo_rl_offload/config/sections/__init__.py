"""The sections of a configuration, whose keys `config/schema.py` puts together."""
