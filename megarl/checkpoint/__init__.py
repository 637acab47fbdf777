"""Checkpoints of a run: what lies on disk, how it gets there, and how a run goes on from it. Megatron's part of them is
`megarl.engine.checkpoint`."""
