"""The teacher's servers as the trainer sees them: they score what the policy has written, and never change."""

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.cluster.cluster import Cluster
from megarl.config import Config
from megarl.data.chat import blamed_on, read_tokenizer
from megarl.engine.hf.shape import ModelShape
from megarl.errors import ConfigError, RunError
from megarl.rollout.client import RolloutClient
from megarl.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Teacher:
    """A server that dies ends the run. Use as a context: `connect` waits for those that the cluster has started."""

    def __init__(self, config: Config, cluster: Cluster):
        self.config = config
        self.cluster = cluster
        self.client: RolloutClient | None = None
        self.vocab_size = 0
        self._urls: list[str] = []  # by index

    def __enter__(self) -> "Teacher":
        return self

    def __exit__(self, *exception) -> None:
        if self.client is not None:
            self.client.close()

    def connect(self) -> None:
        """Wait for the servers. Raises RunError with the log's end of one that does not start."""
        rollout, shape = self.config.rollout, ModelShape.read(self.config.model_of("teacher").path)
        self.vocab_size = shape.vocab_size
        self._urls = self.cluster.wait_teachers()
        self.client = RolloutClient.of(rollout, self._urls, stop_token_ids=[], context_length=shape.max_positions)

    def start_score(self, samples: list[Sample]) -> Callable[[], None]:
        """Begin to score at temperature 1; the returned function waits and fills teacher_logprobs [L], 0 where masked.

        Both raise RunError naming a server that died, failed or was late, or a sample that cannot be scored.
        """
        for sample in samples:
            self._check_tokens(sample)
        pending = self.client.start_logprobs([sample.token_ids.tolist() for sample in samples])

        def wait() -> None:
            for sample, logprobs in zip(samples, self._result(pending), strict=True):
                sample.teacher_logprobs = masked_logprobs(sample, logprobs)

        return wait

    def _result(self, pending: concurrent.futures.Future) -> list[list[float]]:
        try:
            return self.client.result_or_death(pending, self._urls, "teacher server")
        except RunError as error:
            raise RunError(f"scoring by the teacher: {error}") from error

    def _check_tokens(self, sample: Sample) -> None:
        """The policy's vocabulary may be padded beyond the teacher's."""
        if (largest := int(sample.token_ids.max())) >= self.vocab_size:
            text = f"has token {largest}, but the teacher (roles.teacher.path) has {self.vocab_size} tokens"
            raise RunError(f"{_name(sample)} {text}")


def masked_logprobs(sample: Sample, logprobs: list[float]) -> torch.Tensor:
    """[L] float32: a server's log-probs of the trained tokens, 0 elsewhere. RunError for what is not finite there."""
    logprobs_L = torch.tensor(logprobs, dtype=torch.float32).masked_fill(~sample.loss_mask, 0.0)
    if broken := (~logprobs_L.isfinite()).nonzero().flatten().tolist():
        what = f"the teacher's log-probs of {len(broken)} tokens are not finite, the first at index {broken[0]}"
        raise RunError(f"{_name(sample)}: {what}")
    return logprobs_L


def check_same_tokens(student: "PreTrainedTokenizerBase", teacher_path: str | Path) -> None:
    """Raise ConfigError unless the teacher's tokenizer has the policy's vocabulary: it gets token ids, not text."""
    with blamed_on("roles.teacher.path"):
        teacher = read_tokenizer(teacher_path)
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if different := sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)):
        token = different[0]
        raise ConfigError(
            f"roles.teacher.path: the tokenizer in {teacher_path} and the one in model.path differ in {len(different)} "
            f"tokens: {token!r} is {theirs.get(token)} in the former and {ours.get(token)} in the latter"
        )


def _name(sample: Sample) -> str:
    return f"sample {sample.index} of group {sample.group_id}"
