"""Rollout: SGLang servers (server.py), their client (client.py), and the group that carries weights to them."""
