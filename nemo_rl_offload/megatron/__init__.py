"""Everything that touches Megatron-Core and Megatron-Bridge."""
