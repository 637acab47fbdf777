"""After every weight push: does each server compute what the trainer computes?"""

import math
import random
from collections.abc import Callable

import torch

from megarl.cluster.role import RoleGroup
from megarl.errors import RunError
from megarl.rollout.client import RolloutClient
from megarl.sample import Prompt, Sample

LENGTH = 64  # tokens
# Random tokens, which the model did not expect, show rounding more than sampled ones (0.08 for SmolLM2-135M in bfloat16).
DIFF_LIMIT = {"float32": 1e-4, "bfloat16": 0.25}
Expected = Callable[[], list]  # waits for the trainer's (log-probs, entropy) of the canary
AGREEMENT = 0.1  # servers among themselves, as a share of the limit: they run the same program on the same weights


class Canary:
    """A sequence of its own for each version, scored by the trainer and by every server before requests are let through.

    What it cannot see: weights that the sequence does not use (an expert that no token is sent to, the embedding of an
    absent token), and differences below `limit`, the mean over the sequence of |server - trainer| in nats.
    """

    def __init__(self, actor: RoleGroup, client: RolloutClient, vocab_size: int, context_length: int, limit: float):
        self.actor = actor
        self.client = client
        self.vocab_size = vocab_size
        self.length = min(LENGTH, context_length - 1)
        self.limit = limit

    def token_ids(self, version: int) -> list[int]:
        """Not those of another version: an answer from a cache cannot pass for a fresh one. Without the vocabulary's last,
        which SGLang reports as token 0."""
        generator = random.Random(version)
        return [generator.randrange(self.vocab_size - 1) for _ in range(self.length)]

    def ask_trainer(self, version: int) -> Expected:
        """Have the trainer score the version's sequence; its ranks do so when they come to it."""
        ids = self.token_ids(version)
        return self.actor.start_logprobs([Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0)], 1.0)

    def ask_servers(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        """url -> log-probs [L] of the version's sequence. Raises RunError naming a server that does not answer."""
        answers = self.client.score_now(self.token_ids(version), timeout_s).result()
        return {url: torch.tensor(values) for url, values in zip(self.client.urls, answers, strict=True)}

    def compare(self, version: int, expected: list, servers: dict[str, torch.Tensor]) -> float:
        """The largest difference of a server. Raises RunError naming the server that is off, or the two that disagree."""
        ((trainer, _),) = expected
        differences = {url: mean_difference(values, trainer) for url, values in servers.items()}
        worst = max(differences, key=lambda url: (math.isnan(differences[url]), differences[url]))
        if not differences[worst] <= self.limit:
            raise RunError(
                f"weight sync to version {version}: {worst} and the trainer differ by {differences[worst]:.3g} on average "
                f"over {self.length} canary tokens, above {self.limit:g} (sync.canary_diff_limit): it does not hold the "
                f"trainer's weights"
            )
        self._compare_servers(version, servers)
        return differences[worst]

    def _compare_servers(self, version: int, servers: dict[str, torch.Tensor]) -> None:
        (first, reference), *others = servers.items()
        for url, values in others:
            if not mean_difference(values, reference) <= AGREEMENT * self.limit:
                raise RunError(
                    f"weight sync to version {version}: {first} and {url} differ by {mean_difference(values, reference):.3g} on "
                    f"average over {self.length} canary tokens, above {AGREEMENT * self.limit:g}: one of them has other weights"
                )


def mean_difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where either has one."""
    return float((values - expected)[1:].abs().mean())
