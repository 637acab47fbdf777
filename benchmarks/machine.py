"""What a kept figure must say of where it was measured."""

import os
import platform

from megarl.monitor.run_directory import version


def describe_machine() -> dict:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"gpus": gpus, "cores": len(os.sched_getaffinity(0)), "platform": platform.platform()}


def versions(*packages: str) -> dict[str, str | None]:
    return {name: version(name) for name in packages}
