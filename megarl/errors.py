"""The two errors that reach a user as one clear sentence and an exit code, never as a traceback."""


class ConfigError(ValueError):
    """The input is wrong: config, data or model folder. Exit code 2. The message lists every violation found."""


class RunError(RuntimeError):
    """The run cannot go on: a process died, a deadline passed, a number is not to be trusted. Exit code 1."""
