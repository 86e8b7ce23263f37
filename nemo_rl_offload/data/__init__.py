"""Problems, prompts and tokenizers."""
