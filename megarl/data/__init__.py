"""Data: rows to prompts and samples, their order, their quality, the chat template, and the toy task."""
