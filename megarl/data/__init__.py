"""Data: JSONL rows to prompts, the chat template, and the toy task."""
