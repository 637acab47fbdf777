"""The teacher's log-probs by a real SGLang server, and what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from rollout_reference import reference_logprobs

from megarl.config import Config
from megarl.data.chat import load_tokenizer
from megarl.errors import ConfigError, RunError
from megarl.rollout import health
from megarl.rollout.server import free_port
from megarl.rollout.teacher import Teacher, check_same_tokens, masked_logprobs
from megarl.sample import Prompt, Sample

LAST_TOKEN = 447  # of the toy model's vocabulary


@pytest.fixture
def connect(model_folder):
    """connect(urls) -> Teacher of the toy model, closed after the test."""
    teachers = []

    def make(urls):
        config = Config.model_validate(
            {
                "name": "x",
                "model": {"path": str(model_folder)},
                "data": {"train": "none"},
                "algorithm": {"name": "distillation"},
                "roles": {"teacher": {"path": str(model_folder)}},
                "rollout": {"request_timeout_s": 60.0, "max_retries": 0},
            }
        )
        teachers.append(Teacher(config, SimpleNamespace(wait_teachers=lambda: urls)).__enter__())
        teachers[-1].connect()
        return teachers[-1]

    yield make
    for teacher in teachers:
        teacher.__exit__(None, None, None)


def sample_of(response: list[int], index: int = 0) -> Sample:
    return Sample.from_response(Prompt([], [1, 40 + index, 77]), response, group_id=5, index=index)


def test_the_teacher_says_what_transformers_says_of_the_trained_tokens(sglang_server, connect, model):
    samples = [sample_of([5, 301, 12 + i, 2][: 4 - i % 2], i) for i in range(6)]
    samples[0].token_ids[3] = samples[2].token_ids[-1] = LAST_TOKEN  # SGLang reports another id for it
    samples[1].loss_mask[4] = False  # a masked token inside the response
    teacher = connect([sglang_server.url])
    first, second = teacher.start_score(samples[:3]), teacher.start_score(samples[3:])
    second()
    assert samples[0].teacher_logprobs is None
    first()
    for sample in samples:
        expected = reference_logprobs(model, sample.token_ids).masked_fill(~sample.loss_mask, 0.0)
        assert sample.teacher_logprobs.dtype == torch.float32 and expected.count_nonzero() == sample.loss_mask.sum()
        torch.testing.assert_close(sample.teacher_logprobs, expected, atol=1e-4, rtol=0)
        assert torch.equal(sample.teacher_logprobs == 0, ~sample.loss_mask)


def test_a_dead_server_ends_the_run_though_others_could_do_its_work(sglang_server, connect, monkeypatch):
    monkeypatch.setattr(health, "STRIKE_PAUSE_S", 0.01)
    dead = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    samples = [sample_of([5], i) for i in range(4)]
    for urls, index in (([sglang_server.url, dead], 1), ([dead], 0)):
        with pytest.raises(
            RunError, match=rf"^scoring by the teacher: teacher server {index} \({dead}\) is gone: .*Cannot connect"
        ):
            connect(urls).start_score(samples)()
    assert all(sample.teacher_logprobs is None for sample in samples)


def test_what_the_server_refuses_is_shown_with_its_url(sglang_server, connect):
    text = f"^scoring by the teacher: {sglang_server.url}/generate: HTTP 400: .*longer than"
    with pytest.raises(RunError, match=text):
        connect([sglang_server.url]).start_score([sample_of([5] * 300)])()


def test_a_token_that_the_servers_cannot_score_is_refused_with_its_sample(sglang_server, connect):
    teacher = connect([sglang_server.url])
    text = f"^sample 1 of group 5 has token {LAST_TOKEN + 1}, but the teacher .* has 448 tokens"
    with pytest.raises(RunError, match=text):
        teacher.start_score([sample_of([5]), sample_of([5, LAST_TOKEN + 1], 1)])()


def test_a_logprob_that_is_not_finite_is_refused_with_its_sample():
    sample = sample_of([5, 6], 3)
    for broken in (float("nan"), float("-inf")):
        with pytest.raises(RunError, match="sample 3 of group 5: .* of 1 tokens are not finite, the first at index 4"):
            masked_logprobs(sample, [0.0, -0.5, -1.0, -2.0, broken])


def test_a_teacher_with_other_tokens_is_refused(model_folder, tmp_path):
    student = load_tokenizer(model_folder)
    check_same_tokens(student, model_folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (model_folder / name).is_file():
            (tmp_path / name).write_text((model_folder / name).read_text())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    ours, theirs = vocabulary['"'], vocabulary["!"]
    text = f"^roles.teacher.path: .* differ in 2 tokens: '!' is {theirs} in .* {ours} in"
    with pytest.raises(ConfigError, match=text):
        check_same_tokens(student, tmp_path)
    with pytest.raises(ConfigError, match="^roles.teacher.path: .*nowhere is not a folder"):
        check_same_tokens(student, tmp_path / "nowhere")
