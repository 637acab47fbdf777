"""The whole gradient of an engine's last step, by HF name, whatever the layout."""

import torch.distributed as dist


def full_gradients(engine) -> dict:
    """HF name -> gradient as numpy array, on sending ranks; a collective of all ranks. After `train_step` without clipping.

    The distributed optimizer reduces each rank's own shard alone: the shards are put together first.
    """
    for ddp in engine.runnable:
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    return {name: x.clone().cpu().numpy() for name, x in engine.hf_tensors(read=lambda p: p.main_grad) if x.numel()}
