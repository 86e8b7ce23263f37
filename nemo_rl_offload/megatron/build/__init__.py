"""From a policy to Megatron-Core's model, optimizer and back to a Hugging Face folder."""
