"""Rollout: SGLang servers (server.py), their client (client.py), weights to them (sync.py), and all of it together with
restarts (fleet.py)."""
