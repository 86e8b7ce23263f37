"""The configuration: its schema, how it is read, and what is checked before anything starts."""
