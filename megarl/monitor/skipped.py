"""Updates that were skipped because a number in them was not finite."""

import torch

from megarl.errors import RunError
from megarl.monitor.console import Console
from megarl.monitor.run_directory import RunDirectory
from megarl.sample import Sample


class SkippedUpdates:
    """Counts them over the run, keeps each one's batch for inspection, and stops the run beyond `limit`."""

    def __init__(self, limit: int, run: RunDirectory, console: Console):
        self.limit = limit
        self.run = run
        self.console = console
        self.count = 0

    def add(self, when: str, samples: list[Sample], why: str) -> None:
        """`when`: "step_000012". Raises RunError where the limit is passed; the batch is then kept all the same."""
        self.count += 1
        file = self.run.dump_batch(f"{when}_{self.count}", samples)
        text = f"{when}: {why}; the update was skipped, its batch is in {file} ({self.count} skipped so far)"
        self.console.line(f"warning: {text}")
        if self.count > self.limit:
            raise RunError(f"{text}; trainer.max_skipped_updates: {self.limit} were allowed")


def nonfinite_fields(samples: list[Sample]) -> int:
    """How many log-probs, of server, actor and reference, and values of trained tokens are not finite numbers."""
    count = 0
    for sample in samples:
        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values"):
            if (numbers := getattr(sample, name)) is not None:
                count += int((~torch.isfinite(numbers) & sample.loss_mask).sum())
    return count


def why_skipped(result: dict[str, float]) -> str:
    """From what `RoleGroup.train_step` returned of a skipped update."""
    broken = int(result["nonfinite_logprobs"])
    logprobs = f"{broken} log-probs or values are not finite, " if broken else ""
    return f"{logprobs}the loss is {result['loss']:g} and the gradient norm {result['grad_norm']:g}"
