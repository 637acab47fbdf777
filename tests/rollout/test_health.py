"""Strikes, verdicts and what hangs on them, with servers on cue."""

import asyncio

import pytest

from megarl.rollout import health
from megarl.rollout.health import STRIKES, Health
from megarl.rollout.http import ServerFault


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(health, "STRIKE_PAUSE_S", 0.01)
    monkeypatch.setattr(health, "WATCH_S", 0.05)


def judged(scenario, answers):
    """Run `scenario(health, asked)`; `answers[url]` says for each check in turn whether the server works, the last for ever."""
    asked = []

    async def ask(url):
        asked.append(url)
        turn = min(asked.count(url), len(answers[url])) - 1
        if not answers[url][turn]:
            raise ServerFault("connection refused")

    async def run():
        gate = asyncio.Event()
        gate.set()
        return await scenario(Health(list(answers), gate, ask), gate)

    return asyncio.run(run()), asked


def test_a_server_that_fails_all_but_the_last_check_lives():
    async def scenario(health, gate):
        return await health.is_dead("a", "reset"), health.urls, gate.is_set()

    assert judged(scenario, {"a": [False] * (STRIKES - 1) + [True]}) == ((False, ["a"], True), ["a"] * STRIKES)


def test_the_last_strike_takes_a_server_out_and_the_last_server_closes_the_gate():
    async def scenario(health, gate):
        first = await health.is_dead("a", "reset"), health.urls, gate.is_set()
        second = await health.is_dead("b", "reset"), health.urls, gate.is_set()
        return first, second, health.take_dead()

    (first, second, dead), asked = judged(scenario, {"a": [False], "b": [False]})
    assert first == (True, ["b"], True) and second == (True, [], False)
    assert (
        dead.keys() == {"a", "b"} and dead["a"].startswith("reset; then 3 health checks") and len(asked) == 2 * STRIKES
    )


def test_requests_that_fail_together_share_one_trial():
    async def scenario(health, gate):
        return await asyncio.gather(*(health.is_dead("a", "reset") for _ in range(50)))

    verdicts, asked = judged(scenario, {"a": [False]})
    assert verdicts == [True] * 50 and len(asked) == STRIKES


def test_nobody_is_judged_while_the_gate_is_closed():
    async def scenario(health, gate):
        gate.clear()
        return await health.is_dead("a", "paused"), health.urls

    assert judged(scenario, {"a": [False]}) == ((False, ["a"]), [])


def test_a_call_to_a_server_that_hangs_ends_with_the_server():
    async def scenario(health, gate):
        watch = asyncio.ensure_future(health.watch())
        try:
            await health.until_death("a", asyncio.sleep(60))
        except ServerFault as fault:
            return str(fault), await health.until_death("b", asyncio.sleep(0, "answer"))
        finally:
            watch.cancel()

    (fault, answer), _ = judged(scenario, {"a": [True, False], "b": [True]})
    assert fault == "the server died" and answer == "answer"
