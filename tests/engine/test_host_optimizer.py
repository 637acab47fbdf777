"""An optimizer in host memory updates as one on the device does, to the last bit."""

import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import OptimizerConfig
from megarl.engine import host_optimizer
from megarl.sample import Prompt, Sample

SAMPLES = [
    Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in ([5, 6, 7, 8, 9], [8, 9, 4])
]
SETTINGS = OptimizerConfig(weight_decay=0.1, clip_grad=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_hf_model(tmp_path_factory.mktemp("model"), "qwen2", True, num_layers=2))


def trained(engine):
    """What five steps report, a second optimizer's among them, and the weights after each."""
    found = []
    for step in range(5):
        if step in (0, 3):
            engine.use_optimizer(SETTINGS)
        result = engine.train_step(SAMPLES, sft_loss, 1e-2)
        weights = [tensor.clone() for _, tensor in engine.hf_tensors()]
        found.append((result, weights))
    return found


def held(engine) -> int:
    """Bytes of masters and moments on the device, those masters left out that are the weights."""
    (distributed,) = engine.optimizer.chained_optimizers
    masters = [x for group in distributed.shard_fp32_from_float16_groups for x in group]
    states = [x for state in distributed.optimizer.state.values() for x in state.values() if x.dim()]
    assert states
    return sum(x.untyped_storage().nbytes() for x in masters + states)


def compare(rank, folder, dtype, part_bytes):
    host_optimizer.PART_BYTES = part_bytes
    engines = [make_engine(folder, dtype, host_optimizer=host) for host in (False, True)]
    found = [trained(engine) for engine in engines]
    same = [(one[0] == other[0], all(map(torch.equal, one[1], other[1]))) for one, other in zip(*found, strict=True)]
    parts = len(engines[1]._host_optimizers[0]._parts)
    return same, held(engines[0]), held(engines[1]), parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part_bytes", [1, 200_000])
def test_no_bit_of_an_update_differs_and_nothing_stays_on_the_device(folder, dtype, part_bytes):
    """One parameter at a time, and some."""
    for same, on_device, in_host, parts in run_ranks(compare, 2, folder, dtype, part_bytes):
        assert same == [(True, True)] * 5
        assert on_device > 0 and in_host == 0
        assert parts > (5 if part_bytes == 1 else 1)
