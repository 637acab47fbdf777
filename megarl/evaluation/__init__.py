"""What models answer to the same prompts: how good it is, how sure that is, and which model is better."""
