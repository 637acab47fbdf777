"""SGLang's answers to /generate, read and checked: what cannot be trained on as it is raises RunError."""

import math

import torch

from megarl.errors import RunError
from megarl.sample import Prompt, Status


def read_response(url: str, prompt: Prompt, response: dict, limit: int, with_logprobs: bool) -> dict:
    """The fields of `Sample.from_response` that a server knows, of one response of at most `limit` tokens.

    The token that ended the turn is part of `output_ids` and has its log-prob: it was sampled, so it is trained on.
    """
    meta = response["meta_info"]
    ids, reason = response["output_ids"], meta["finish_reason"]
    if reason["type"] == "stop" and (not ids or reason["matched"] != ids[-1]):
        # SGLang replaces a token outside the vocabulary by a stop token and says "NaN happened" here.
        raise RunError(f"{url}: a response stopped at {reason['matched']!r}, not at its last token {ids[-1:]}")
    if reason["type"] == "length" and len(ids) != limit:
        raise RunError(
            f"{url} cut a response at {len(ids)} tokens, asked for {limit}: its KV cache is too small for a prompt of "
            f"{len(prompt.token_ids)} (rollout.server_args.max_total_tokens, mem_fraction_static)"
        )
    version = _weight_version(url, meta)
    return {
        "response_ids": ids,
        "status": Status.COMPLETED if reason["type"] == "stop" else Status.TRUNCATED,
        "policy_version": (version, version),
        "rollout_logprobs": _output_logprobs(url, prompt, ids, meta) if with_logprobs else None,
    }


def abort_message(answer: dict | list[dict]) -> str | None:
    """Why one of a request's responses was aborted; None if none was."""
    for response in answer if isinstance(answer, list) else [answer]:
        reason = response["meta_info"]["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            return f"aborted: {reason.get('message')}"
    return None


def input_logprobs(url: str, token_ids: list[int], answer: dict) -> list[float]:
    """[L] log-probs of the given tokens; SGLang has none for the first one, which becomes 0, and null for NaN."""
    entries = answer["meta_info"]["input_token_logprobs"]
    last = max(token_ids)  # of the vocabulary, SGLang reports the last token as 0, with its own log-prob all the same
    if [entry[1] for entry in entries] not in (token_ids, [0 if token == last else token for token in token_ids]):
        raise RunError(f"{url} scored other tokens than the {len(token_ids)} that were sent")
    return [0.0] + [math.nan if entry[0] is None else entry[0] for entry in entries[1:]]


def _output_logprobs(url: str, prompt: Prompt, ids: list[int], meta: dict) -> torch.Tensor:
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != ids:
        raise RunError(f"{url}: {len(entries)} log-probs do not belong to the {len(ids)} tokens of their response")
    values = [entry[0] for entry in entries]
    if not all(value is not None and math.isfinite(value) for value in values):  # JSON has no NaN: it comes as null
        raise RunError(f"{url}: a response has log-probs that are not finite; its weights may be broken")
    return torch.tensor([0.0] * len(prompt.token_ids) + values, dtype=torch.float32)


def _weight_version(url: str, meta: dict) -> int:
    try:
        return int(meta["weight_version"])
    except ValueError:
        raise RunError(f"{url}: weight_version {meta['weight_version']!r} is not one of megarl's") from None
