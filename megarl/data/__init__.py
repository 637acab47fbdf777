"""Data: rows to prompts, their order, the chat template, and the toy task."""
