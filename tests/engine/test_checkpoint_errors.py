"""Checkpoints that cannot be written, or are not what an engine needs (O16)."""

import resource
import shutil
from contextlib import contextmanager

import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import CriticConfig, ModelConfig, OptimizerConfig
from megarl.errors import ConfigError, RunError
from megarl.sample import Prompt, Sample

SAMPLES = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in ([1, 2, 3], [4, 5, 6, 7])]

LIMITS = (1_000, 60_000, 100_000, 150_000)  # bytes of a file, of about 340_000: inside of small tensors and large ones


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_hf_model(tmp_path_factory.mktemp("model"), "qwen2", True, num_layers=2)


@contextmanager
def small_files(limit: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_on_failing_disks(rank, model, folder):
    """Folder -> the files that one Writer told of there, or its RunError."""
    from megarl.engine import checkpoint, parallel
    from megarl.engine.checkpoint import Contents, Writer

    engine = make_engine(model)
    engine.use_optimizer(OptimizerConfig())
    engine.train_step(SAMPLES, sft_loss, 1e-3)
    writer = Writer(engine, model)
    told = {}

    def attempt(name):
        parallel.barrier()
        writer.start(folder / name, Contents(optimizer=True))
        try:
            told[name] = sorted(writer.finish())
        except RunError as error:
            told[name] = str(error)

    for name in ("full disk", "no folder", "full disk for .metadata", "full disk for megarl.json"):
        attempt(name)
    for limit in LIMITS:
        with small_files(limit if rank == 1 else resource.RLIM_INFINITY):
            attempt(f"limit {limit}")
    writer.model_path = folder / "removed"
    attempt("no model")
    writer.model_path = model
    attempt("sound")
    parallel.barrier()
    again = make_engine(model)
    again.use_optimizer(OptimizerConfig())
    checkpoint.load(again, folder / "sound", Contents(optimizer=True))
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), engine.parameters()))
    return told


def test_the_rank_that_cannot_write_says_why_the_others_do_not_wait_and_the_next_save_is_sound(model, tmp_path):
    limits = [f"limit {limit}" for limit in LIMITS]
    for name in ("full disk", "full disk for .metadata", "full disk for megarl.json", *limits, "no model", "sound"):
        (tmp_path / name).mkdir()
    (tmp_path / "full disk" / "__1_0.distcp").symlink_to("/dev/full")
    (tmp_path / "full disk for .metadata" / ".metadata.tmp").symlink_to("/dev/full")
    (tmp_path / "full disk for megarl.json" / "megarl.json").symlink_to("/dev/full")
    first, second = run_ranks(save_on_failing_disks, 2, model, tmp_path, timeout_s=60)

    def message(name, why):
        return f"{tmp_path / name} cannot be written: {why}"

    full, missing = "[Errno 28] No space left on device", "[Errno 2] No such file or directory"
    assert (first["full disk"], second["full disk"]) == ([], message("full disk", full))
    for name in limits:
        assert (first[name], second[name]) == ([], message(name, "[Errno 27] File too large"))
    for rank, told in enumerate((first, second)):
        path = tmp_path / "no folder" / f"__{rank}_0.distcp"
        assert told["no folder"] == message("no folder", f"{missing}: '{path}'")
    for name in ("full disk for .metadata", "full disk for megarl.json"):
        assert (first[name], second[name]) == (message(name, full), ["__1_0.distcp"])
    assert f"{tmp_path / 'removed'} is there no more" in first["no model"]
    assert second["sound"] == ["__1_0.distcp"]
    of_model = ["hf/config.json", "hf/generation_config.json"]
    assert first["sound"] == [".metadata", "__0_0.distcp", *of_model, "megarl.json", "metadata.json"]


def save_two(rank, model, folder):
    """A checkpoint of weights, and one with the optimizer."""
    from megarl.engine import checkpoint

    engine = make_engine(model)
    checkpoint.save(engine, model, folder / "weights")
    engine.use_optimizer(OptimizerConfig())
    checkpoint.save(engine, model, folder / "sound", checkpoint.Contents(optimizer=True))


def load_each(rank, models, folder, cases):
    """What the load of each folder into a fresh engine raised."""
    from megarl.engine import checkpoint
    from megarl.engine.engine import Engine

    raised, engines = {}, {}
    for name, (kind, contents) in cases.items():
        if kind not in engines:
            model, head, dtype = models[kind]
            engines[kind] = Engine(ModelConfig(path=str(model), dtype=dtype), CriticConfig(), head)
            engines[kind].use_optimizer(OptimizerConfig())
        before = [parameter.clone() for parameter in engines[kind].parameters()]
        try:
            checkpoint.load(engines[kind], folder / name, checkpoint.Contents(**contents))
        except (ConfigError, RunError) as error:
            raised[name] = f"{type(error).__name__}: {error}"
            unchanged = all(torch.equal(x, y) for x, y in zip(before, engines[kind].parameters()))
            assert unchanged or isinstance(error, RunError)
    return raised


def zero_first_half(file):
    """Its size stays."""
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(bytes(half) + content[half:])


OPTIMIZER = {"optimizer": True}
LOADS = {  # folder -> engine, what to load, error
    "truncated": ("same", OPTIMIZER, "ConfigError: {folder}/__1_0.distcp has {size} bytes, and its tensors reach to"),
    "missing": ("same", OPTIMIZER, "ConfigError: {folder}/__1_0.distcp is missing"),
    "no metadata": ("same", OPTIMIZER, "ConfigError: {folder}/.metadata is missing"),
    "overwritten": ("same, another", OPTIMIZER, "RunError: {folder} cannot be loaded: "),
    "weights": ("same", OPTIMIZER | {"reference": True},
                "ConfigError: {folder} holds no optimizer state, and holds no reference policy"),
    "sound for another dtype": ("other dtype", OPTIMIZER,
                                "ConfigError: {folder} was saved in float32: its optimizer state does not fit"),
    "sound for a critic": ("critic", OPTIMIZER, "ConfigError: {folder} has a head of the kind 'lm': 'value' is needed"),
    "sound for more layers": ("deeper", OPTIMIZER, "RunError: {folder} cannot be loaded: Global shape mismatch"),
}  # fmt: skip


def test_a_folder_that_is_not_whole_or_of_another_engine_is_refused_by_name(model, tmp_path):
    run_ranks(save_two, 2, model, tmp_path)
    for name in LOADS:
        if name != "weights":
            shutil.copytree(tmp_path / "sound", tmp_path / name)
    file = tmp_path / "truncated" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "missing" / "__1_0.distcp").unlink()
    (tmp_path / "no metadata" / ".metadata").unlink()
    zero_first_half(tmp_path / "overwritten" / "__0_0.distcp")
    deeper = write_hf_model(tmp_path / "deeper", "qwen2", True, num_layers=3)
    models = {
        "same": (model, "lm", "float32"),
        "same, another": (model, "lm", "float32"),
        "other dtype": (model, "lm", "bfloat16"),
        "critic": (model, "value", "float32"),
        "deeper": (deeper, "lm", "float32"),
    }
    cases = {name: (kind, contents) for name, (kind, contents, _) in LOADS.items()}
    (raised,) = run_ranks(load_each, 1, models, tmp_path, cases | {"sound": ("same", OPTIMIZER)})
    assert raised.keys() == LOADS.keys()
    for name, (_, _, expected) in LOADS.items():
        text = expected.format(folder=tmp_path / name, size=file.stat().st_size)
        assert raised[name].startswith(text), raised[name]
