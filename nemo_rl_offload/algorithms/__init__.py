"""Training algorithms, one readable loop each."""
