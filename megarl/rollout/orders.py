"""What is asked of a server's `receiver.receive`: requests of SGLang's /update_weights_from_tensor."""

import base64
import io
import json
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing import reductions

from megarl.rollout.server import WEIGHT_RECEIVER

PATH = "/update_weights_from_tensor"
_DEVICE = 6  # the place of the device's number among the arguments of torch's rebuild_cuda_tensor


def request(order: dict, num_ranks: int, weight_version: str | None = None, shared: torch.Tensor | None = None) -> dict:
    """The body for a server of `num_ranks`: to SGLang the order is the name of a tensor, which is `shared` or an empty one.

    `shared` goes by handle, to a server on the same machine: leave it as it is until the answer. With a version, the last
    order of a push, cached prefixes are forgotten and the version is set.
    """
    name = json.dumps(order)
    if shared is None:
        payloads = [pickle.dumps([(name, _Empty())])] * num_ranks
    else:  # one each: torch counts how often a handle is opened
        payloads = [_by_handle([(name, _Shared(shared))]) for _ in range(num_ranks)]
    return {
        "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
        "load_format": WEIGHT_RECEIVER,
        "flush_cache": weight_version is not None,
        "weight_version": weight_version,
    }


class _Empty:
    """Pickled as an empty tensor. Pickling one goes by a function that Megatron replaces, and SGLang takes torch's only."""

    def __reduce__(self):
        return torch.Tensor, ()


class _Shared:
    """Pickled as its tensor. Processes number devices differently, so SGLang's ranks also take a UUID for one."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __reduce__(self):
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        if self.tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
            arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        return rebuild, arguments


def _by_handle(value) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()
