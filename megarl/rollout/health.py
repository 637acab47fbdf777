"""Which servers are alive: several strikes and a server is dead, and nobody waits for it any longer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from megarl.rollout.http import ServerFault

STRIKES = 3  # health checks in a row
STRIKE_PAUSE_S = 1.0
WATCH_S = 10.0  # between health checks of servers that seem to work


class Health:
    """Lives in the client's event loop; `urls` may be read from anywhere.

    `ask(url)` raises ServerFault where a server does not work. Nobody is judged while the gate is closed: a paused server
    does not answer. When the last one is dead the gate is closed until somebody opens it.
    """

    def __init__(self, urls: list[str], gate: asyncio.Event, ask: Callable[[str], Awaitable[None]]):
        self.urls = urls
        self._gate = gate
        self._ask = ask
        self._deaths: dict[str, asyncio.Future] = {}  # done when the server is found dead
        self._trials: dict[str, asyncio.Task] = {}
        self._dead: dict[str, str] = {}  # why, of those not yet taken

    async def until_death(self, url: str, call: Coroutine[Any, Any, Any]) -> Any:
        """What `call` to this server returns. Raises ServerFault as soon as the server is found dead."""
        death = self._deaths.setdefault(url, asyncio.get_running_loop().create_future())
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ServerFault("the server died")
            return task.result()
        finally:
            task.cancel()

    async def is_dead(self, url: str, why: str) -> bool:
        """The verdict on a server after a fault, one for all who ask while it is being found."""
        if url not in self.urls:
            return True
        if url not in self._trials:
            self._trials[url] = asyncio.ensure_future(self._try(url, why))
            self._trials[url].add_done_callback(lambda _: self._trials.pop(url))
        return await asyncio.shield(self._trials[url])

    async def watch(self) -> None:
        """Try all servers again and again."""
        while True:
            await asyncio.sleep(WATCH_S)
            await asyncio.gather(*(self.is_dead(url, "no sign of life") for url in self.urls))

    def admit(self, urls: list[str]) -> None:
        self.urls = urls

    def bury(self, url: str) -> None:
        self._dead.pop(url, None)
        self.urls = [other for other in self.urls if other != url]
        if not self.urls:
            self._gate.clear()
        if death := self._deaths.pop(url, None):
            death.set_result(None)

    def take_dead(self) -> dict[str, str]:
        """Servers found dead since the last call, each with why."""
        dead, self._dead = self._dead, {}
        return dead

    async def _try(self, url: str, why: str) -> bool:
        for strike in range(STRIKES):
            if strike:
                await asyncio.sleep(STRIKE_PAUSE_S)
            try:
                if self._gate.is_set():
                    await self._ask(url)
                return False
            except ServerFault as fault:
                last = fault
        if not self._gate.is_set():
            return False
        self.bury(url)
        self._dead[url] = f"{why}; then {STRIKES} health checks in a row failed, the last with: {last}"
        return True
