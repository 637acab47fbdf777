"""The trainer's side of the SGLang servers: token ids in, token ids, log-probs and scores out; weights and pauses.

Calls are synchronous for the trainer. A background thread runs one event loop that does all HTTP, so a call can also
be started and awaited later: the weight updates are, because the trainer broadcasts while the servers receive.

Log-probs: SGLang returns log p of logits / temperature for sampled tokens, before top-p and top-k; but log p of the
plain logits, at temperature 1 whatever is asked, for given ones (`logprobs`).
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from megarl.config import RolloutConfig, SamplingConfig
from megarl.errors import RunError
from megarl.rollout import http, orders
from megarl.rollout.health import Health
from megarl.rollout.http import Aborted, ServerFault
from megarl.rollout.responses import abort_message, input_logprobs, read_response
from megarl.rollout.server import HEALTH_TIMEOUT_S
from megarl.rollout.weights_group import Bucket
from megarl.sample import Prompt, Sample

FIRST_BACKOFF_S = 0.5  # doubles with each attempt
CLOSE_S = 10.0
POLL_S = 0.5  # between two calls of `while_waiting`
PAUSE_TIMEOUT_S = 15.0  # for what a server that works does at once


class RolloutClient:
    """Speaks to all servers of a run. Prompt i goes to server i modulo their number; a failed request to the next one.

    `request_timeout_s` bounds one attempt, `max_retries` the further attempts of one request. `stop_token_ids` end a
    response, besides the model's own. `context_length` bounds prompt + response (the model's, in tokens).
    """

    def __init__(
        self,
        urls: list[str],
        sampling: SamplingConfig,
        request_timeout_s: float,
        max_retries: int,
        max_concurrent_prompts: int,
        stop_token_ids: list[int],
        context_length: int,
        gate_timeout_s: float | None = None,
    ):
        """`gate_timeout_s` bounds the wait of a request for the gate; None: as an attempt."""
        assert urls, "a rollout client needs at least one server"
        self.sampling = sampling
        self.request_timeout_s = request_timeout_s
        self.gate_timeout_s = gate_timeout_s or request_timeout_s
        self.max_retries = max_retries
        self.stop_token_ids = stop_token_ids
        self.context_length = context_length
        self._slots = asyncio.Semaphore(max_concurrent_prompts)
        self._gate = asyncio.Event()
        self._gate.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        self._session = self.start(http.open_session()).result()
        self._num_ranks: dict[str, int] = {}  # of each server
        self._health = Health(urls, self._gate, self._ask_health)

    @classmethod
    def of(cls, settings: RolloutConfig, urls: list[str], **more) -> "RolloutClient":
        """One to these servers as the config has it; `more`: the parameters that are no keys of it."""
        return cls(
            list(urls),
            settings.sampling,
            request_timeout_s=settings.request_timeout_s,
            max_retries=settings.max_retries,
            max_concurrent_prompts=settings.max_concurrent_prompts,
            **more,
        )

    # Generation

    def generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        tokenizer,
        temperature: float | None = None,
        while_waiting: Callable[[], None] = lambda: None,
        seeds: list[list[int]] | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Sample]:
        """`group_size` samples for each prompt, in order: sample i * group_size + j is the j-th of prompt i.

        `temperature` and `max_new_tokens` override the configured ones; a temperature of 0 is greedy and gives no
        `rollout_logprobs`. `group_id` is the prompt's place in this call, `index` the sample's. A response may have at
        most min(max_new_tokens, context_length - prompt length) tokens. `while_waiting` is called again and again
        meanwhile.
        `seeds`: one per sample, [i][j]; only servers of deterministic inference heed them (rollout/seeds.py).
        Raises RunError when a request fails for good.
        """
        if temperature is None:
            temperature = self.sampling.temperature
        assert seeds is None or [len(group) for group in seeds] == [group_size] * len(prompts), "one seed per sample"
        limits = [self._response_limit(prompt, max_new_tokens or self.sampling.max_new_tokens) for prompt in prompts]
        requests = [
            self._request(i, self._generate_body(prompt.token_ids, group_size, temperature, limit, seeds and seeds[i]))
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        pending = self.start(self._watched(_all(requests)))
        try:
            while not concurrent.futures.wait([pending], timeout=POLL_S).done:
                while_waiting()
        finally:
            pending.cancel()  # where an error or Ctrl-C ended the wait
        answers_P = pending.result()
        samples = []
        for group_id, (prompt, limit, (url, answer)) in enumerate(zip(prompts, limits, answers_P, strict=True)):
            responses_G = answer if isinstance(answer, list) else [answer]
            if len(responses_G) != group_size:
                raise RunError(f"{url}: {len(responses_G)} responses for group_size={group_size}")
            for response in responses_G:
                fields = read_response(url, prompt, response, limit, with_logprobs=temperature > 0)
                fields["response_text"] = tokenizer.decode(fields["response_ids"], skip_special_tokens=True)
                samples.append(Sample.from_response(prompt, group_id=group_id, index=len(samples), **fields))
        return samples

    def logprobs(self, token_ids: list[list[int]], server_index: int | None = None) -> list[list[float]]:
        """log p(token t | tokens before t) of given sequences: L values each, the first 0, at temperature 1.

        `server_index` names one server; None spreads the sequences over all.
        """
        return self.start_logprobs(token_ids, server_index).result()

    def start_logprobs(self, token_ids: list[list[int]], server_index: int | None = None) -> concurrent.futures.Future:
        """The same, beginning now."""

        async def score() -> list[list[float]]:
            requests = [self._request(i, _logprobs_body(ids), server_index) for i, ids in enumerate(token_ids)]
            answers = await self._watched(_all(requests))
            return [input_logprobs(url, ids, answer) for ids, (url, answer) in zip(token_ids, answers, strict=True)]

        return self.start(score())

    def start_classify(self, token_ids: list[list[int]]) -> concurrent.futures.Future:
        """Have servers of a classifier score given sequences, beginning now: (url, what it says) of each."""

        async def classify() -> list[tuple[str, list[float | None]]]:
            requests = [self._request(i, {"input_ids": ids}, path="/classify") for i, ids in enumerate(token_ids)]
            return [(url, answer["embedding"]) for url, answer in await self._watched(_all(requests))]

        return self.start(classify())

    def result_or_death(self, pending: concurrent.futures.Future, servers: list[str], who: str) -> Any:
        """The result of what was started; RunError as soon as one of `servers`, the urls by index, is found dead."""
        done = False
        while not done:
            done = bool(concurrent.futures.wait([pending], timeout=POLL_S).done)
            self.raise_dead(servers, who)
        return pending.result()

    def raise_dead(self, servers: list[str], who: str) -> None:
        """RunError where one of `servers`, the urls by index, was found dead: for those that nobody starts again."""
        if dead := self.take_dead():
            names = (f"{who} {servers.index(url)} ({url}) is gone: {why}" for url, why in dead.items())
            raise RunError("; ".join(names))

    def score_now(self, token_ids: list[int], timeout_s: float) -> concurrent.futures.Future:
        """Each server's log-probs of one sequence, as `logprobs` gives them: past the gate, and never tried again."""
        return self.start(_all([self._score_now(url, token_ids, timeout_s) for url in self.urls]))

    # Which servers there are

    def take_dead(self) -> dict[str, str]:
        """Servers found dead since the last call, each with why: they get no requests any more."""
        return self._on_loop(self._health.take_dead)

    def silent(self, paused: bool) -> list[str]:
        """After a failed weight update: the servers that are dead or do not come back to work. Of `paused` servers,
        which may be without their memory, only whether they answer."""
        answers = self.start(_all([self._comes_back(url, paused) for url in self.urls])).result()
        return [url for url, comes_back in zip(self.urls, answers) if not comes_back]

    def remove(self, url: str) -> None:
        """A server is gone: what it has of our requests goes elsewhere, once the gate is open and there is one."""
        self._on_loop(self._health.bury, url)

    def admit(self, urls: list[str]) -> None:
        """All servers that there are now, in order."""
        self._on_loop(self._health.admit, urls)

    @property
    def urls(self) -> list[str]:
        """Of the living servers, in order."""
        return self._health.urls

    def close_gate(self) -> None:
        """Hold back new requests, e.g. around a weight update. Running ones are left alone, but if they are aborted
        while the gate is closed they are made again after it opens, and that is no failure."""
        self._loop.call_soon_threadsafe(self._gate.clear)

    def open_gate(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.set)

    # Control: every call raises RunError naming the server that failed or was late

    def pause(self, timeout_s: float | None = None) -> None:
        """Abort running requests and hold new ones, on every server; close the gate first.

        Through an open gate an aborted request would be made again at once, and a pausing server aborts it again.
        """
        self._control_all("/pause_generation", {"mode": "abort"}, timeout_s).result()

    def resume(self, timeout_s: float | None = None) -> None:
        self._control_all("/continue_generation", {}, timeout_s).result()

    def weight_versions(self, timeout_s: float | None = None) -> list[str]:
        """Of every server, as it says itself; "-1" if none was ever pushed."""
        calls = [self._control(url, "/model_info", None, timeout_s) for url in self.urls]
        return [str(answer["weight_version"]) for answer in self.start(_all(calls)).result()]

    def leave_gpus(self, timeout_s: float) -> None:
        """Have every server give its memory for weights and KV cache back, the contents with it; until `resume_memory`,
        a push and `resume` they do nothing."""
        self.close_gate()
        self.pause(timeout_s)
        self._control_all("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, timeout_s).result()

    def resume_memory(self, tag: Literal["weights", "kv_cache"], timeout_s: float) -> None:
        """Have every server take it again; what is in it is undefined."""
        self._control_all("/resume_memory_occupation", {"tags": [tag]}, timeout_s).result()

    def join_weights_group(
        self,
        server_index: int,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> concurrent.futures.Future:
        """Have one server join a broadcast group with its ranks from `rank_offset` on; done when all have joined."""
        order = {
            "do": "join",
            "group": group_name,
            "address": master_address,
            "port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "backend": backend,
            "timeout_s": timeout_s,
        }
        return self.start(self._order(self.urls[server_index], order, timeout_s))

    def receive_weights(
        self, buckets: list[Bucket], group_name: str, weight_version: str | None, timeout_s: float
    ) -> concurrent.futures.Future:
        """Have every server receive these buckets one after another, by broadcast from rank 0 of the group.

        Rank 0 learns what could not be loaded; a server that dies is named here. With a version, the last of a push,
        cached prefixes are forgotten and the version is set. `timeout_s` bounds it all.
        """
        order = {"do": "receive", "group": group_name, "buckets": buckets}
        return self.start(_all([self._order(url, order, timeout_s, weight_version) for url in self.urls]))

    def checksums(self, timeout_s: float) -> dict[str, dict[str, str]]:
        """url -> "rank/SGLang's name of the tensor" -> its checksum; on GPUs only."""
        answers = self._control_all("/weights_checker", {"action": "checksum"}, timeout_s).result()
        return {
            url: {
                f"{rank}/{name}": value
                for rank, info in enumerate(answer["ranks"])
                for name, value in info["checksums"].items()
            }
            for url, answer in zip(self.urls, answers, strict=True)
        }

    def overwrite_weights(self, timeout_s: float) -> None:
        """Fill every server's weights with noise."""
        self._control_all("/weights_checker", {"action": "reset_tensors"}, timeout_s).result()

    # The event loop

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """Run a coroutine on the client's own loop and return at once; `.result()` waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Drop what still runs, after an interrupt say, and end the background thread; may be called again."""
        if self._loop.is_closed():
            return
        self.start(self._cancel_all()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()

    # Inside

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    def _response_limit(self, prompt: Prompt, max_new_tokens: int) -> int:
        room = self.context_length - len(prompt.token_ids)
        if room < 1:
            raise RunError(
                f"{prompt.metadata.get('source', 'a prompt')}: {len(prompt.token_ids)} tokens leave no room for a "
                f"response in a context of {self.context_length}: lower data.max_prompt_tokens"
            )
        return min(max_new_tokens, room)

    def _generate_body(
        self, token_ids: list[int], group_size: int, temperature: float, limit: int, seeds: list[int] | None
    ) -> dict:
        params = {
            "n": group_size,
            "temperature": temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "max_new_tokens": limit,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.sampling.ignore_eos,
        }
        body = {"input_ids": token_ids, "sampling_params": params, "return_logprob": temperature > 0}
        if seeds is None:
            return body
        # A batch of single samples: all n of one prompt would get the same seed, and so be the same.
        seeded = [params | {"n": 1, "sampling_seed": seed} for seed in seeds]
        return body | {"input_ids": [token_ids] * group_size, "sampling_params": seeded}

    async def _request(
        self, i: int, body: dict, server_index: int | None = None, path: str = "/generate"
    ) -> tuple[str, Any]:
        """(url, answer) of a call, tried again on the next server after a fault; a server's death is none."""
        faults = []
        async with self._slots:
            while len(faults) <= self.max_retries:
                if faults:
                    await asyncio.sleep(FIRST_BACKOFF_S * 2 ** (len(faults) - 1))
                await self._wait_for_gate()
                url = self.urls[(i + len(faults)) % len(self.urls) if server_index is None else server_index]
                try:
                    call = http.call(self._session, url, path, body, self.request_timeout_s)
                    answer = await self._health.until_death(url, call)
                    if message := abort_message(answer):
                        raise Aborted(message)
                    return url, answer
                except ServerFault as fault:
                    deliberate = isinstance(fault, Aborted) and not self._gate.is_set()  # by our own pause
                    if not deliberate and not await self._health.is_dead(url, str(fault)):
                        faults.append(f"{url}: {fault}")
        raise RunError(
            f"rollout: request {i} failed {len(faults)} times (rollout.max_retries={self.max_retries}): "
            f"{'; '.join(faults)}"
        )

    async def _watched(self, requests: Coroutine[Any, Any, list]) -> list:
        """Looks after the servers while the requests run: one that hangs answers nothing, and raises nothing either."""
        watch = asyncio.ensure_future(self._health.watch())
        try:
            return await requests
        finally:
            watch.cancel()

    async def _ask_health(self, url: str) -> None:
        """Raises ServerFault where the server does not work; any other answer is a sign of life."""
        with contextlib.suppress(RunError):
            await http.call(self._session, url, "/health", None, HEALTH_TIMEOUT_S)

    def _on_loop(self, function: Callable, *arguments) -> Any:
        """Health's state changes in the loop's thread only."""

        async def call() -> Any:
            return function(*arguments)

        return self.start(call()).result(CLOSE_S)

    async def _comes_back(self, url: str, paused: bool) -> bool:
        try:
            if paused:
                await http.call(self._session, url, "/server_info", None, PAUSE_TIMEOUT_S)  # asks the scheduler
            else:
                await http.call(self._session, url, "/continue_generation", {}, PAUSE_TIMEOUT_S)
                await http.call(self._session, url, "/health", None, HEALTH_TIMEOUT_S)
            return True
        except (ServerFault, RunError):
            return False

    async def _order(self, url: str, order: dict, timeout_s: float, weight_version: str | None = None) -> None:
        """Have `megarl.rollout.receiver` do something in each rank of a server."""
        if url not in self._num_ranks:
            self._num_ranks[url] = (await self._control(url, "/server_info", None, timeout_s))["tp_size"]
        body = orders.request(order, self._num_ranks[url], weight_version)
        await self._control(url, orders.PATH, body, timeout_s)

    async def _score_now(self, url: str, token_ids: list[int], timeout_s: float) -> list[float]:
        answer = await self._control(url, "/generate", _logprobs_body(token_ids), timeout_s)
        return input_logprobs(url, token_ids, answer)

    async def _wait_for_gate(self) -> None:
        try:
            await asyncio.wait_for(self._gate.wait(), self.gate_timeout_s)
        except TimeoutError:
            raise RunError(f"rollout: the gate stayed closed for {self.gate_timeout_s:g} s") from None

    def _control_all(self, path: str, body: dict, timeout_s: float | None) -> concurrent.futures.Future:
        return self.start(_all([self._control(url, path, body, timeout_s) for url in self.urls]))

    async def _control(self, url: str, path: str, body: dict | None, timeout_s: float | None) -> Any:
        try:
            answer = await http.call(self._session, url, path, body, timeout_s or self.request_timeout_s)
        except ServerFault as fault:
            raise RunError(f"{url}{path}: {fault}") from fault
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RunError(f"{url}{path}: {answer.get('message')}")
        return answer


def _logprobs_body(token_ids: list[int]) -> dict:
    params = {"max_new_tokens": 0, "temperature": 1.0}
    return {"input_ids": token_ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}


async def _all(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Their results, in order; the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
