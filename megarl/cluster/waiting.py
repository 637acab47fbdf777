"""Waiting for calls on Ray actors: one deadline, and the first failure, by name, ends the wait."""

import time

import ray
from ray.exceptions import RayError, RayTaskError

from megarl.errors import ConfigError, RunError


def wait_all(refs: dict[str, ray.ObjectRef], what: str, timeout_s: float, key: str | None = None) -> list:
    """The results of calls, in order; `refs` names who answers each ("actor rank 3"), `key` where the time is from.

    Raises RunError naming who failed, died or was late; the others may hang in a collective and are not waited for. A
    ConfigError passes as it is.
    """
    deadline = time.monotonic() + timeout_s
    waiting = dict(refs)
    while waiting:
        done, _ = ray.wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            within = f"{timeout_s:g} s" + (f" ({key})" if key else "")
            raise RunError(f"{what}: no answer within {within} from {', '.join(waiting)}")
        for name in [name for name, ref in waiting.items() if ref in done]:
            _raise_if_failed(name, waiting.pop(name), what)
    return ray.get(list(refs.values()))


def raise_failed(refs: dict[str, ray.ObjectRef], what: str) -> None:
    """Raise as `wait_all` does for a call that has failed by now; wait for nothing."""
    for name, ref in refs.items():
        if ray.wait([ref], timeout=0)[0]:
            _raise_if_failed(name, ref, what)


def who_is_gone(refs: dict[str, ray.ObjectRef], timeout_s: float) -> dict[str, str]:
    """What became of those who should answer a trivial call and do not, by name; first of those who died."""
    answered, silent = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    died = {}
    for name, ref in refs.items():
        try:
            if ref in answered:
                ray.get(ref)
        except RayTaskError:
            continue  # it lives
        except RayError:
            died[name] = "died"
    return died | {name: f"does not answer within {timeout_s:g} s" for name, ref in refs.items() if ref in silent}


def _raise_if_failed(name: str, ref: ray.ObjectRef, what: str) -> None:
    try:
        ray.get(ref)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, (ConfigError, RunError)):
            raise type(cause)(str(cause)) from None
        raise RunError(f"{what}: {name} failed with {type(cause).__name__}: {cause}") from error
    except RayError as error:
        # Without the actor's ids and the guesses at causes, which are the same for every death.
        lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
        text = "\n".join(line.partition(" Some common causes include")[0] for line in lines)
        raise RunError(f"{what}: the process of {name} died: {text}") from error
