"""Host memory for copies of tensors."""

import torch

from megarl.engine.offload import HostMemory, Snapshot

SIZES = [3, 0, 70_000, 1, 64]


def test_parts_are_disjoint_have_storages_of_their_own_and_take_the_same_memory_again():
    memory = HostMemory()
    parts = list(memory.parts(SIZES))
    for i, part in enumerate(parts):
        part.fill_(i)
    assert [part.untyped_storage().nbytes() for part in parts] == [part.nbytes for part in parts] == SIZES
    assert all((part == i).all() for i, part in enumerate(parts))
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    again = list(memory.parts(SIZES[2:]))
    assert again[0].data_ptr() == parts[0].data_ptr()
    again[0].fill_(7)
    (larger,) = memory.parts([200_000])
    larger.fill_(9)
    assert (again[0] == 7).all()  # what holds the old block may keep it


def test_a_snapshot_keeps_the_values_of_a_time_and_averages_in_its_own_dtype():
    tensors = [torch.full((3, 4), 1.0, dtype=torch.bfloat16), torch.zeros((), dtype=torch.bfloat16)]
    snapshot = Snapshot()
    snapshot.take(tensors, torch.float32)
    for tensor in tensors:
        tensor.fill_(3.0)
    snapshot.average(tensors, 0.999)
    assert [part.dtype for part in snapshot.parts] == [torch.float32] * 2
    torch.testing.assert_close(snapshot.parts[0], torch.full((3, 4), 1.002))
    assert snapshot.parts[1].shape == () and snapshot.parts[1] == torch.tensor(0.003)
