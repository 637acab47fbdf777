"""The order in which a run sees its rows: by seed and epoch alone, and saved with the run."""

import functools
import hashlib
import itertools
import json
import random
from fractions import Fraction

from megarl.config_data import SourceConfig
from megarl.data.sources import listed, weights_of
from megarl.errors import ConfigError
from megarl.sample import Prompt, Sample

Row = Prompt | list[Sample]  # the samples of one prompt


class PromptStream:
    """Endless rows. Without weights an epoch is a shuffle of all rows, and uses each of them once.

    With weights, one per source, every source has epochs of its own. Which one comes next is decided by the quota
    method (Balinski and Young 1975): of those that have had less than their share, the one that is due first. So after
    any number of rows every source has had its share to within one row.

    One stream in the driver feeds all workers, so their number does not matter.
    """

    def __init__(self, rows: list[Row], seed: int, weights: list[float] | None = None):
        self.seed = seed
        self.weights = weights
        self.pools = pools_of(rows, len(weights)) if weights else [rows]
        if not all(self.pools):
            raise ConfigError("a prompt stream needs at least one prompt of every source")
        self.shares = shares_of(weights or [1])
        self.taken = [0] * len(self.pools)  # rows, over all epochs
        self.orders: list[tuple[int, list[int]]] = [(-1, [])] * len(self.pools)  # (epoch, of its rows)

    def next(self, n: int) -> list[Row]:
        """The next n rows; where an epoch ends among them, the next one's begin."""
        return [self._take(self._next_source()) for _ in range(n)]

    def _next_source(self) -> int:
        number = sum(self.taken) + 1
        behind = [i for i, share in enumerate(self.shares) if self.taken[i] < number * share]
        return min(behind, key=lambda i: (self.taken[i] + 1) / self.shares[i])

    def _take(self, source: int) -> Row:
        pool = self.pools[source]
        epoch, offset = divmod(self.taken[source], len(pool))
        if self.orders[source][0] != epoch:
            self.orders[source] = (epoch, self._epoch_order(source, epoch))
        self.taken[source] += 1
        return pool[self.orders[source][1][offset]]

    def _epoch_order(self, source: int, epoch: int) -> list[int]:
        order = list(range(len(self.pools[source])))
        place = f"{source}:{epoch}" if len(self.pools) > 1 else f"{epoch}"
        random.Random(f"prompts:{self.seed}:{place}").shuffle(order)  # seeded by a string: the same in every process
        return order

    def state_dict(self) -> dict:
        """What a checkpoint keeps, as JSON: the position, and what it is a position in."""
        return {"taken": list(self.taken)} | self._identity

    def load_state_dict(self, state: dict) -> None:
        """Go on exactly where the other stream was. Raises ConfigError where its rows, seed or weights were others."""
        for name, mine in self._identity.items():
            if state[name] != mine:
                given = f"{name} {mine}, but {state[name]} where it was saved"
                raise ConfigError(f"data.train: the order of the prompts cannot go on: given {given}")
        self.taken = list(state["taken"])

    @functools.cached_property
    def _identity(self) -> dict:
        sizes = [len(pool) for pool in self.pools]
        return {"seed": self.seed, "weights": self.weights, "rows": sizes, "digest": digest(sum(self.pools, []))}


def digest(rows: list[Row]) -> str:
    """Of what the rows say, not of their token ids: a template may put in the day's date."""
    sha256 = hashlib.sha256()
    for row in rows:
        prompt, samples = prompt_of(row), [] if isinstance(row, Prompt) else row
        said = [prompt.messages, prompt.tools, prompt.answer, [sample.response_text for sample in samples]]
        sha256.update(json.dumps(said, sort_keys=True).encode())
    return sha256.hexdigest()


def prompt_of(row: Row) -> Prompt:
    return row if isinstance(row, Prompt) else row[0].prompt


def pools_of(rows: list[Row], num_sources: int) -> list[list[Row]]:
    """The rows of each source."""
    pools: list[list[Row]] = [[] for _ in range(num_sources)]
    for row in rows:
        pools[prompt_of(row).source_index].append(row)
    return pools


def first_rows(rows: list[Row], num_rows: int, num_sources: int) -> list[Row]:
    """At most so many, from all sources in turn: the first of each, then the second."""
    turns = itertools.zip_longest(*pools_of(rows, num_sources))
    return [row for turn in turns for row in turn if row is not None][:num_rows]


def shares_of(weights: list[float]) -> list[Fraction]:
    """Exactly those of the numbers as they are written: nothing may rest on a rounding."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def check_enough(rows: list[Row], prompts_per_step: int, sources: list[SourceConfig], what: str) -> None:
    """Raise ConfigError where one step would have to use a row twice."""
    limit = f"algorithm.prompts_per_step={prompts_per_step}"
    if len(rows) < prompts_per_step:
        raise ConfigError(f"{len(rows)} {what} < {limit} ({listed(sources)})")
    if weights := weights_of(sources):
        for source, share, pool in zip(sources, shares_of(weights), pools_of(rows, len(sources))):
            if len(pool) < (needed := prompts_per_step * share):
                text = f"{float(needed):g}, the share by weight {source.weight:g} of {limit}"
                raise ConfigError(f"{len(pool)} {what} < {text} ({source})")
