"""Episodes that NeMo-Gym leads, in processes of its own."""
