"""The Megatron-Core engine: one `Engine` per rank, whatever its role."""
