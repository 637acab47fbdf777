"""What the rollout tests share: a real server, and what transformers says of the same tokens."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.rollout.server import Server

CONTEXT = 256  # of the toy model


@torch.no_grad()
def reference_logprobs(model, token_ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """[L] log p(token t | tokens before t) of logits / temperature, by transformers; 0 for the first token."""
    logits_LV = model(token_ids[None]).logits[0].float() / temperature
    logprobs = logits_LV[:-1].log_softmax(-1).gather(-1, token_ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logprobs])


def hf_weights(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight) for name, weight in model.state_dict().items() if name != "lm_head.weight"]  # tied


@contextlib.contextmanager
def serving(folder: Path, tensor_parallel: int, log_path: Path, **more) -> Iterator[Server]:
    """A real server of the model in `folder`, float32 on CPU."""
    server = Server(str(folder), "float32", "cpu", tensor_parallel, None, {}, log_path, start_timeout_s=400, **more)
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
