"""What runs inside Ray's actors: one EngineWorker per rank of a Megatron role, one ServerWorker per SGLang server.

Megatron and torch are imported in the methods: importing this module in the trainer must stay cheap.
"""

import faulthandler
import gc
import os
import socket
import sys
from pathlib import Path

from megarl.machine import gpu_memory, interface_of

DYING_S = 5.0  # for a server whose connections broke to end


class EngineWorker:
    """One rank: holds the Engine for `RoleGroup`."""

    def __init__(self, rank: int, log_path: str, gpu: str | None):
        """`gpu`: one that the rank shares with another role's, as CUDA_VISIBLE_DEVICES; None: what Ray gives it."""
        import ray

        self.rank = rank
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        redirect_output(log_path)
        # Else gloo takes what the host name resolves to: often the loopback, which other nodes cannot reach.
        if interface := interface_of(ray.util.get_node_ip_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def address(self) -> tuple[str, int]:
        """(address, free port) of this rank's node, for a store that this rank hosts."""
        import ray

        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def visible_gpu(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(
        self,
        world_size: int,
        master_address: str,
        master_port: int,
        model,
        role,
        head: str,
        trainable: bool,
        seed: int,
        collective_timeout_s: float,
    ) -> dict:
        """Join the role's ranks and load the model. Returns this rank's place: what `RoleGroup` must know of it."""
        from megarl.engine import parallel
        from megarl.engine.checkpoint import Writer
        from megarl.engine.engine import Engine
        from megarl.engine.fused import live_paths

        parallel.initialize(self.rank, world_size, master_address, master_port, role, seed, collective_timeout_s)
        self.engine = Engine(model, role, head, trainable)
        self.writer = Writer(self.engine, model.path)
        gc.collect()
        gc.freeze()  # a full collection would walk all imported modules while the GPU waits
        return {
            "stage": parallel.pipeline_parallel_rank(),
            "helps_to_send": parallel.helps_to_send(),
            "sends_weights": parallel.sends_weights(),
            "backend": parallel.backend(),
            "live_paths": live_paths(self.engine.use_te),
        }

    def use_optimizer(self, settings) -> None:
        self.engine.use_optimizer(settings)

    def capture_reference(self, ema_decay: float | None) -> None:
        self.engine.capture_reference(ema_decay)

    def train_step(self, samples: list, loss, *arguments) -> dict[str, float]:
        return self.engine.train_step(samples, loss, *arguments)

    def evaluate(self, samples: list, loss, pairs: bool) -> dict[str, float]:
        return self.engine.evaluate(samples, loss, pairs)

    def logprobs(self, samples: list, temperature: float, reference: bool) -> dict:
        """`Engine.logprobs` as numpy arrays: a pickled tensor would carry the storage of its whole micro-batch."""
        scored = self.engine.logprobs(samples, temperature, reference)
        return {i: tuple(None if x is None else x.numpy() for x in tensors) for i, tensors in scored.items()}

    def values(self, samples: list) -> dict:
        return {index: values.numpy() for index, values in self.engine.values(samples).items()}

    def place(self, phase: str) -> None:
        self.engine.place(phase)

    def used_bytes(self) -> int:
        from megarl.engine import parallel

        return parallel.used_bytes()

    def gpu_memory(self) -> tuple[str, dict[int, int]]:
        """(This node, bytes that the rank holds of its GPU, by the GPU's number)."""
        return socket.gethostname(), gpu_memory(self.visible_gpu().split(","), [os.getpid()])

    def plan_buckets(self, bucket_bytes: int) -> list:
        from megarl.engine.weights import WeightSender

        self.sender = WeightSender(self.engine, bucket_bytes)
        return self.sender.plan()

    def join_weights_group(self, *args) -> None:
        self.sender.join(*args)

    def send_weights(self, timeout_s: float) -> None:
        self.sender.send(timeout_s)

    def share_weights(self, *args) -> None:
        self.sender.share(*args)

    def start_save(self, folder: str, reference: bool) -> int:
        from megarl.engine.checkpoint import Contents

        return self.writer.start(folder, Contents(optimizer=True, reference=reference))

    def has_written(self) -> bool:
        return self.writer.is_written()

    def finish_save(self) -> dict:
        return self.writer.finish()

    def load(self, folder: str, reference: bool) -> bool:
        from megarl.engine.checkpoint import Contents, load

        return load(self.engine, folder, Contents(optimizer=True, reference=reference))


class ServerWorker:
    """Supervises one SGLang server on the node where its bundle is. The server dies with this process."""

    def __init__(self, this_machine_only: bool, **server_arguments):
        import ray

        from megarl.rollout.server import Server

        host = "127.0.0.1" if this_machine_only else ray.util.get_node_ip_address()
        self.server = Server(host=host, **server_arguments)

    def start(self) -> str:
        """The server's URL, once it generates."""
        self.server.start()
        self.server.wait_ready()
        return self.server.url

    def restart(self) -> str:
        """The same after its end, whatever state it is in."""
        self.server.stop()
        return self.start()

    def death_report(self) -> str | None:
        """After a failure: a server whose connections broke may still be on its way out."""
        return self.server.death_report(DYING_S)

    def gpu_memory(self) -> tuple[str, dict[int, int]]:
        """(This node, bytes that the server holds of its GPUs, by their numbers)."""
        return socket.gethostname(), gpu_memory(self.server.gpus, self.server.pids)

    def stop(self) -> None:
        self.server.stop()


def redirect_output(log_path: str) -> None:
    """Send all that this process and its libraries print to a file of its own, crashes' stacks included."""
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
