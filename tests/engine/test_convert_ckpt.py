"""Hugging Face folder <-> Megatron checkpoint, both ways, without an engine (O17, O18)."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks
from safetensors.torch import load_file, save_file

from megarl.algorithms.losses import sft_loss
from megarl.checkpoint.folder import publish
from megarl.config import CriticConfig, ModelConfig, OptimizerConfig
from megarl.engine.hf.export import export_hf
from megarl.engine.hf.import_hf import import_hf
from megarl.errors import ConfigError, RunError
from megarl.sample import Prompt, Sample

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "convert_ckpt.py"
BENCHMARK = ROOT / "benchmarks" / "convert.py"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
SEQUENCES = [[5, 6, 7, 8, 9, 3, 90], list(range(100, 60, -1)), [1, 100] * 9]
SAMPLES = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def small_files(folder: Path) -> set[str]:
    return {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file() and x.suffix != ".safetensors"}


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def expected_logprobs(folder: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    logits = [model(torch.tensor([ids])).logits[0].detach() for ids in SEQUENCES]
    return [x.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]] for x, ids in zip(logits, SEQUENCES)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_gives_back_every_tensor_bit_for_bit(tmp_path, family, tied):
    model = write_hf_model(tmp_path / "model", family, tied, vocab_size=101, num_layers=3, max_shard_size="50KB")
    import_hf(model, tmp_path / "checkpoint")
    shutil.copytree(model, tmp_path / "kept")
    shutil.rmtree(model)  # a checkpoint needs nothing beside itself
    export_hf(tmp_path / "checkpoint", tmp_path / "out", max_shard_size="50KB")
    assert equal(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "kept"))
    assert ("lm_head.weight" in tensors_of(tmp_path / "out")) != tied
    config, before = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "kept"))
    assert config == before and config["vocab_size"] == 101 and config["tie_word_embeddings"] is tied
    index, before = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("out", "kept")
    )
    assert index["metadata"] == before["metadata"] and index["weight_map"].keys() == before["weight_map"].keys()
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert len(load_file(file)) == 1 or sum(t.nbytes for t in load_file(file).values()) <= 50_000
        assert {name for name, where in index["weight_map"].items() if where == file.name} == load_file(file).keys()


def saved_and_loaded(rank, folder, cases):
    """For each model: (what its imported checkpoint holds, what one holds that an engine saves, the engine's
    predictions, and those after the imported one was loaded into it)."""
    from torch.distributed.checkpoint import FileSystemReader

    from megarl.engine import checkpoint
    from megarl.engine.engine import Engine

    def contents(path):
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        return {key: (x.size, x.properties.dtype) for key, x in stored.items() if hasattr(x, "size")}

    def predict(engine):
        if head == "value":
            return {i: x.tolist() for i, x in engine.values(SAMPLES).items()}
        return {i: x[0].tolist() for i, x in engine.logprobs(SAMPLES, 1.0).items()}

    found = {}
    for name, head in cases.items():
        engine = Engine(ModelConfig(path=str(folder / name), dtype="float32"), CriticConfig(), head, trainable=False)
        saved, imported = folder / f"{name}_saved", folder / f"{name}_imported" / "actor"
        checkpoint.save(engine, folder / name, saved)
        before = predict(engine)
        with torch.no_grad():
            for parameter in engine.parameters():
                parameter.fill_(0.5)
        checkpoint.load(engine, imported)
        found[name] = contents(imported), contents(saved), before, predict(engine)
    return found


def test_an_imported_checkpoint_is_one_that_an_engine_would_save(tmp_path):
    cases = {"llama": "lm", "qwen2": "value", "qwen3": "lm", "qwen3_moe": "lm"}
    for family, head in cases.items():
        write = write_classifier if head == "value" else write_hf_model
        model = write(tmp_path / family, family, tied=family == "qwen3", vocab_size=101, num_layers=2)
        import_hf(model, tmp_path / f"{family}_imported")
    ((found),) = run_ranks(saved_and_loaded, 1, tmp_path, cases)
    for name, (imported, saved, before, after) in found.items():
        assert imported == saved and before == after and len(before) == len(SEQUENCES), name


def logprobs_of_imported(rank, model, folder, role):
    from megarl.engine import checkpoint

    engine = make_engine(model, **role)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(0.5)
    checkpoint.load(engine, folder / "actor")
    return {i: x[0].tolist() for i, x in engine.logprobs(SAMPLES, 1.0).items()}


def test_engines_of_another_layout_load_an_imported_checkpoint_and_pad_its_vocabulary_further(tmp_path):
    model = write_hf_model(tmp_path / "model", "qwen3_moe", False, vocab_size=150, num_layers=2)  # 192 rows, or 256
    import_hf(model, tmp_path / "checkpoint")
    role = {"tensor_parallel": 2, "sequence_parallel": True}
    results = run_ranks(logprobs_of_imported, 2, model, tmp_path / "checkpoint", role, **role)
    found = {i: x for result in results for i, x in result.items()}
    for i, expected in enumerate(expected_logprobs(model)):
        torch.testing.assert_close(torch.tensor(found[i][1:]), expected, atol=1e-5, rtol=0)


def train_and_save(rank, model, folder):
    """Log-probs after one step, and the step's checkpoint."""
    from megarl.engine import checkpoint

    engine = make_engine(model)
    engine.use_optimizer(OptimizerConfig())
    engine.train_step(SAMPLES, sft_loss, 1e-2)
    checkpoint.save(engine, model, folder, checkpoint.Contents(optimizer=True))
    return {i: x[0].tolist() for i, x in engine.logprobs(SAMPLES, 1.0).items()}


@pytest.mark.parametrize("family, tied", [("qwen2", False), ("llama", True)])
def test_a_run_of_four_ranks_is_exported_on_one_and_gives_equal_logprobs_in_transformers(tmp_path, family, tied):
    model = write_hf_model(tmp_path / "model", family, tied, vocab_size=101, num_layers=2)
    change(model / "config.json", dtype="bfloat16")  # as released; trained in float32
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000007"
    results = run_ranks(train_and_save, 4, model, f"{checkpoint}.partial/actor", tensor_parallel=2, pipeline_parallel=2)
    if tied:  # one that names no head is of a language model
        Path(f"{checkpoint}.partial/actor/megarl.json").write_text('{"dtype": "float32"}')
    publish(Path(f"{checkpoint}.partial"), {})
    shutil.rmtree(model)
    export_hf(tmp_path / "run", tmp_path / "out")
    logprobs = {i: values for result in results for i, values in result.items()}
    for i, expected in enumerate(expected_logprobs(tmp_path / "out")):
        torch.testing.assert_close(torch.tensor(logprobs[i][1:]), expected, atol=1e-5, rtol=0)
    about = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert (about["step"], about["source"]) == (7, str(checkpoint / "actor"))


def write_classifier(folder: Path, family: str, tied: bool, score_bias: float | None = None, **shape) -> Path:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write_hf_model(folder / "base", family, tied, **shape)
    config = AutoConfig.from_pretrained(folder / "base", num_labels=1, pad_token_id=3)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(folder / "base", config=config).save_pretrained(folder)
    shutil.rmtree(folder / "base")
    if score_bias is not None:
        tensors = load_file(folder / "model.safetensors") | {"score.bias": torch.tensor([score_bias])}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("bias", [None, 0.75])
def test_the_critic_of_a_checkpoint_makes_the_round_trip_of_a_classifier(tmp_path, bias):
    model = write_classifier(tmp_path / "model", "qwen2", bias is None, bias, vocab_size=101, num_layers=2)
    policy = write_hf_model(tmp_path / "policy", "qwen2", True, vocab_size=101, num_layers=2)
    import_hf(policy, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="checkpoint has no critic, only actor"):
        export_hf(tmp_path / "checkpoint", tmp_path / "out", role="critic")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    import_hf(model, tmp_path / "value", role="critic")
    (tmp_path / "value" / "critic").rename(tmp_path / "checkpoint" / "critic")
    (tmp_path / "checkpoint" / "manifest.json").unlink()
    said = export_hf(tmp_path / "checkpoint", tmp_path / "out", role="critic")
    assert ("scores there are lower by 0.75" in said) == (bias == 0.75)
    expected = {"score.bias": torch.tensor([0.0])} | tensors_of(model)
    assert equal(tensors_of(tmp_path / "out"), expected)
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", model))
    assert config["architectures"] == before["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["id2label"] == {"0": "score"} and config["tie_word_embeddings"] == (bias is None)


def test_small_files_come_along_and_weights_come_in_the_dtype_that_is_asked_for(tmp_path):
    model = write_hf_model(tmp_path / "model", "llama", False, vocab_size=101, num_layers=2)
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer.model", "additional_chat_templates/tool.jinja"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    change(model / "config.json", torch_dtype="float64", architectures=None)
    import_hf(model, tmp_path / "checkpoint", dtype="float32")
    small = small_files(model)
    for dtype in ("float32", "bfloat16", "float16"):
        out = tmp_path / dtype
        export_hf(tmp_path / "checkpoint", out, dtype=dtype)
        assert small_files(out) == small | {"conversion.json"}
        assert (out / "tokenizer.json").read_text() == "tokenizer.json"
        assert equal(tensors_of(out), {name: t.to(getattr(torch, dtype)) for name, t in tensors_of(model).items()})
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == dtype and "torch_dtype" not in config
        assert config["architectures"] == ["LlamaForCausalLM"]
    import_hf(tmp_path / "bfloat16", tmp_path / "narrow")  # as its tensors are
    export_hf(tmp_path / "narrow", tmp_path / "again")
    assert equal(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "bfloat16"))


def test_values_that_do_not_fit_into_the_dtype_are_refused_and_nothing_is_left(tmp_path):
    model = write_hf_model(tmp_path / "model", "llama", True, vocab_size=101, num_layers=2)
    tensors = tensors_of(model)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    import_hf(model, tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "out", dtype="bfloat16")
    with pytest.raises(RunError, match="model.layers.1.mlp.up_proj.weight holds values that are not finite in float16"):
        export_hf(tmp_path / "checkpoint", tmp_path / "half", dtype="float16")
    with pytest.raises(RunError, match="linear_fc1.weight holds values that are not finite in float16"):
        import_hf(model, tmp_path / "half", dtype="float16")
    assert not list(tmp_path.glob("half*"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    import_hf(write_hf_model(folder / "model", "qwen2", False, vocab_size=101, num_layers=2), folder / "checkpoint")
    return folder / "checkpoint"


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forget(manifest: Path, name: str) -> None:
    files = json.loads(manifest.read_text())["files"]
    del files[name]
    manifest.write_text(json.dumps({"files": files}))


DATA, INDEX, CONFIG = "actor/__0_0.distcp", "actor/.metadata", "actor/hf/config.json"
DAMAGES = {  # -> what is done to a checkpoint, and how that is told: with its manifest, and without (None: not tried)
    "a rank's file is missing": (lambda f: (f / DATA).unlink(), f"{DATA} is missing", f"{DATA} is missing"),
    "a file is truncated": (
        lambda f: os.truncate(f / DATA, 5000),
        f"{DATA} has 5000 bytes and had",
        f"{DATA} has 5000 bytes, and its tensors reach to",
    ),
    "a bit has changed": (lambda f: flip_a_bit(f / DATA), f"{DATA} has changed", None),
    "the index is missing": (lambda f: (f / INDEX).unlink(), f"{INDEX} is missing", f"{INDEX} is missing"),
    "the index is truncated": (lambda f: os.truncate(f / INDEX, 100), f"{INDEX} has 100 bytes", f"{INDEX} is broken"),
    "the manifest lacks a file": (
        lambda f: forget(f / "manifest.json", DATA),
        f"manifest.json has no entry of {DATA}",
        None,
    ),
    "the config is another model's": (
        lambda f: change(f / CONFIG, vocab_size=170, num_hidden_layers=3),
        None,
        r"embedding.word_embeddings.weight is \[128, 64\] and by config.json should be \[192, 64\]; .*; "
        r"decoder.layers.mlp.linear_fc1.weight is \[2, 192, 64\] and by config.json should be \[3, 192, 64\]",
    ),
    "the config is another family's": (
        lambda f: change(f / CONFIG, model_type="llama"),
        None,
        "decoder.layers.self_attention.linear_qkv.bias have no place in a llama model with head lm",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_with_a_checkpoint_is_told_before_anything_is_written(tmp_path, checkpoint, damage):
    hurt, with_manifest, without = DAMAGES[damage]
    for has_manifest, expected in ((True, with_manifest), (False, without)):
        if expected is not None:
            folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
            hurt(folder)
            if not has_manifest:
                (folder / "manifest.json").unlink()
            with pytest.raises(ConfigError, match=expected):
                export_hf(folder, tmp_path / "out")
            assert not list(tmp_path.glob("out*"))
            shutil.rmtree(folder)


def test_what_is_wrong_with_a_hugging_face_folder_is_told_all_at_once(tmp_path):
    model = write_hf_model(tmp_path / "model", "qwen3", False, vocab_size=101, num_layers=2, max_shard_size="50KB")
    shards = sorted(model.glob("*.safetensors"))
    shards[0].rename(tmp_path / "kept")
    os.truncate(shards[1], 3000)
    with pytest.raises(ConfigError, match=f"{shards[0].name} is missing; .*{shards[1].name} is broken: "):
        import_hf(model, tmp_path / "out")
    shutil.rmtree(model)
    write_hf_model(model, "qwen3", False, vocab_size=101, num_layers=2)
    tensors = tensors_of(model)
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.ones(65)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(128)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as error:
        import_hf(model, tmp_path / "out")
    for part in (
        "it lacks lm_head.weight",
        "model.norm.weight is [65] and by config.json should be [64]",
        "model.layers.0.self_attn.q_proj.bias has no place in a qwen3 model",
    ):
        assert part in str(error.value)
    assert not list(tmp_path.glob("out*"))


def export_on_a_full_disk(rank, checkpoint, out):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        export_hf(checkpoint, out)
    except RunError as error:
        return str(error)


def test_an_export_that_cannot_be_written_leaves_nothing(tmp_path, checkpoint):
    (said,) = run_ranks(export_on_a_full_disk, 1, checkpoint, tmp_path / "out")
    assert f"{tmp_path / 'out'} was not written: " in said and not list(tmp_path.iterdir())


def verified(rank, folder, checkpoint, classifier):
    """What `verify` says of: exports in two dtypes, a classifier's import and export, and an export with two heads
    exchanged."""
    from megarl.engine import parallel
    from megarl.engine.hf.verify import compare
    from megarl.rollout.server import free_port

    parallel.shutdown()
    said = [
        export_hf(checkpoint, folder / "float32", verify=True),
        export_hf(checkpoint, folder / "bfloat16", dtype="bfloat16", verify=True),
        import_hf(classifier, folder / "value", dtype="bfloat16", verify=True),
        export_hf(folder / "value", folder / "classifier", dtype="float32", verify=True),
    ]
    tensors = load_file(folder / "float32" / "model.safetensors")
    queries = tensors["model.layers.0.self_attn.q_proj.weight"].view(8, -1)
    tensors["model.layers.0.self_attn.q_proj.weight"] = queries[[1, 0, *range(2, 8)]].view(64, 64).contiguous()
    save_file(tensors, folder / "float32" / "model.safetensors", {"format": "pt"})
    try:
        compare(checkpoint / "actor", folder / "float32")
    except RunError as error:
        said.append(str(error))
    parallel.initialize(0, 1, "127.0.0.1", free_port("127.0.0.1"), CriticConfig(), seed=1)
    return said


def test_verify_compares_with_transformers_and_finds_exchanged_heads(tmp_path, checkpoint):
    model = write_classifier(tmp_path / "model", "llama", False, 0.75, vocab_size=101, num_layers=2)
    ((same, narrow, imported, classifier, exchanged),) = run_ranks(verified, 1, tmp_path, checkpoint, model)
    for text, what in ((same, "log-probs"), (narrow, "log-probs"), (imported, "scores"), (classifier, "scores")):
        assert f"{what} of 3 random sequences" in text and "bound 0.0001" in text
        assert ("rounding the weights moved them by at most 0.0" in text) == (text in (narrow, imported))
    assert f"{tmp_path / 'float32'} is not the model of {checkpoint / 'actor'}: " in exchanged


def test_the_tool_converts_both_ways_and_says_what_it_wrote(tmp_path, checkpoint):
    def run(*arguments) -> subprocess.CompletedProcess:
        command = [sys.executable, TOOL, *arguments, "--role", "critic"]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    there = run("--from-hf", checkpoint.parent / "model", "there")
    assert there.returncode == 0 and "wrote there from" in there.stdout, there.stderr
    back = run("--to-hf", "there", "back", "--dtype", "bfloat16", "--max-shard-size", "50KB", "--verify")
    assert back.returncode == 0 and "bound 0.0001" in back.stdout, back.stderr
    digest = subprocess.check_output("sha256sum *.safetensors | sha256sum", shell=True, cwd=tmp_path / "back")
    assert digest.decode().split()[0] in back.stdout.splitlines()[-1]
    expected = {name: t.bfloat16() for name, t in tensors_of(checkpoint.parent / "model").items()}
    assert equal(tensors_of(tmp_path / "back"), expected)
    again = run("--to-hf", "there", "back")
    assert again.returncode == 2 and "back exists already" in again.stderr


def test_a_folder_that_exists_and_a_size_without_unit_are_refused(tmp_path, checkpoint):
    with pytest.raises(ConfigError, match="--max-shard-size: Unit 'ES' not supported"):
        export_hf(checkpoint, tmp_path / "out", max_shard_size="5 apples")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    for convert in (export_hf, import_hf):
        with pytest.raises(ConfigError, match="out exists already; a conversion never overwrites"):
            convert(checkpoint, tmp_path / "out")


def test_kept_figures_show_that_memory_is_bounded_by_the_largest_tensor_whatever_the_number_of_layers():
    report = json.loads((ROOT / "benchmarks/results/convert_cpu.json").read_text())
    assert report["shape"] == "llama-70b" and [case["layers"] for case in report["results"]] == [1, 2]
    for direction in ("to_megatron", "to_hf"):
        few, more = (case[direction]["peak_gb"] for case in report["results"])
        assert max(few, more) < 2.5 * report["results"][0]["largest_tensor_gb"] and abs(few - more) < 0.25


@pytest.mark.soak
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_conversion_that_is_interrupted_leaves_no_folder_of_that_name_and_none_in_the_way(tmp_path, sent):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_layers": 8}
    import_hf(write_hf_model(tmp_path / "model", "llama", False, **sizes), tmp_path / "checkpoint")
    process = subprocess.Popen([sys.executable, TOOL, "--to-hf", tmp_path / "checkpoint", tmp_path / "out"])
    while not list(tmp_path.glob("out.partial/*.safetensors")):
        assert process.poll() is None, "it has ended"
        time.sleep(0.01)
    process.send_signal(sent)
    assert process.wait(60) == (130 if sent == signal.SIGINT else -sent)
    assert not (tmp_path / "out").exists() and (sent != signal.SIGINT or not (tmp_path / "out.partial").exists())
    export_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert equal(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "model"))


@pytest.mark.soak
def test_the_benchmark_of_conversions_runs(tmp_path):
    command = [sys.executable, BENCHMARK, "--shape", "tiny", "--folder", tmp_path, "--out", tmp_path / "out.json"]
    subprocess.run(command, check=True, timeout=300)
    assert [case["layers"] for case in json.loads((tmp_path / "out.json").read_text())["results"]] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
