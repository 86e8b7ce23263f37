"""What a layer saves, holds and computes: bytes and operations."""
