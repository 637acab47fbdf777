"""Which tokens a reward model reads, which folders cannot be one, and what is said of a score that is none."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config import Config
from megarl.data import toy
from megarl.data.chat import load_tokenizer
from megarl.errors import ConfigError, RunError
from megarl.rewards.model import RewardModel, RewardTokens, read_score
from megarl.sample import Prompt, Sample, Status

OTHER_TEMPLATE = "{{ bos_token }}{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}A: "
NO_SUMS = "{% if '1 + 2' in messages[0].content %}{{ raise_exception('no sums') }}{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
QWEN = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "score"}}
LLAMA = QWEN | {"architectures": ["LlamaForSequenceClassification"]}
WEIGHT, ZERO, ONE = {"score.weight": torch.ones(1, 64)}, {"score.bias": torch.zeros(1)}, {"score.bias": torch.ones(1)}
MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy.make(folder, seed=1)
    return folder / "model"


@pytest.fixture
def make_tokens(policy, tmp_path):
    """make_tokens(...) -> RewardTokens of a copy of the policy's folder with a head, and with what is given."""

    def make(head=WEIGHT | ZERO, config=QWEN, role="reward_model", tokenizer=None, template=..., data={}):
        reward = shutil.copytree(policy, tmp_path / "reward")
        hf = json.loads((reward / "config.json").read_text()) | config
        (reward / "config.json").write_text(json.dumps(hf))
        save_file(load_file(reward / "model.safetensors") | head, reward / "model.safetensors")
        if tokenizer:
            (reward / "tokenizer.json").write_text(tokenizer((reward / "tokenizer.json").read_text()))
        if template is not ...:
            settings = json.loads((reward / "tokenizer_config.json").read_text())
            (reward / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        settings = {
            "name": "x",
            "model": {"path": str(policy)},
            "data": {"train": "t", "max_prompt_tokens": 64} | data,
            "rollout": {"sampling": {"max_new_tokens": 100}},
            "roles": {role: {"path": str(reward)}},
        }
        return RewardTokens(Config.model_validate(settings), load_tokenizer(policy), [Prompt(MESSAGES, [1])])

    return make


@pytest.fixture
def sample_of(policy):
    """sample_of("text") -> a sample of the policy's, its response ended unless `status` says otherwise."""
    tokenizer = load_tokenizer(policy)

    def make(text, status=Status.COMPLETED, index=0):
        ids = tokenizer.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False)
        # One token per character: not the ids that the text is encoded to.
        response = sum((tokenizer.encode(character, add_special_tokens=False) for character in text), [])
        response += [tokenizer.eos_token_id] * (status is Status.COMPLETED)
        fields = {"response_text": text, "status": status, "group_id": 4, "index": index}
        return Sample.from_response(Prompt(MESSAGES, ids), response, **fields)

    return make


def swapped(tokenizer: str) -> str:
    """A tokenizer.json with two ids exchanged."""
    content = json.loads(tokenizer)
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    return json.dumps(content)


def test_the_policys_tokens_are_scored_as_they_were_sampled(make_tokens, sample_of):
    samples = [sample_of("three"), sample_of("3", Status.TRUNCATED), sample_of("")]
    assert make_tokens().encode(samples) == [sample.token_ids.tolist() for sample in samples]


@pytest.mark.parametrize("other", [{"tokenizer": swapped}, {"template": OTHER_TEMPLATE}], ids=["tokens", "template"])
def test_a_reward_model_of_other_tokens_reads_the_conversation_in_its_own(make_tokens, sample_of, other):
    tokens = make_tokens(**other)
    own = tokens.tokenizer
    prompt = own.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    encoded = tokens.encode([sample_of("has 3 books! "), sample_of("buys", Status.TRUNCATED)])
    assert [own.decode(ids) for ids in encoded] == [f"{prompt}has 3 books! {own.eos_token}", f"{prompt}buys"]
    assert encoded[1] == own.encode(prompt, add_special_tokens=False) + own.encode("buys", add_special_tokens=False)


def test_a_special_token_that_the_policy_spells_out_is_text(make_tokens, sample_of):
    tokens = make_tokens(template=OTHER_TEMPLATE)
    text = f"no{tokens.tokenizer.eos_token}yes"
    (ids,) = tokens.encode([sample_of(text, Status.TRUNCATED)])
    assert tokens.tokenizer.eos_token_id not in ids and tokens.tokenizer.decode(ids).endswith(text)


def test_without_a_template_of_its_own_it_has_that_of_the_data(make_tokens, tmp_path):
    (tmp_path / "other.jinja").write_text(OTHER_TEMPLATE)
    with pytest.raises(ConfigError, match="^roles.reward_model.path: the tokenizer in .*reward has no chat template"):
        make_tokens(template=None)
    shutil.rmtree(tmp_path / "reward")
    assert make_tokens(template=None, data={"chat_template": str(tmp_path / "other.jinja")}).tokenizer.chat_template


REFUSED = [
    ({"head": {}}, "reward has no score.weight; a reward model's has shape .1, 64."),
    ({"head": {"score.weight": torch.ones(2, 64)}}, r"reward has a score.weight of shape \(2, 64\)"),
    ({"head": WEIGHT, "role": "reward_server"}, "no score.bias, and SGLang's Qwen2ForSequenceClassification would leave "
     "it at a random value; valid: with a score.bias of 0, or this one as roles.reward_model.path"),
    ({"head": WEIGHT | ONE, "config": LLAMA, "role": "reward_server"}, "has a score.bias of 1, and SGLang's "
     "LlamaForSequenceClassification leaves it out; valid: without one, or this one as roles.reward_model.path"),
    ({"data": {"max_prompt_tokens": 200}}, r"max_prompt_tokens \+ rollout.sampling.max_new_tokens = 200 \+ 100 = 300 "
     "is more than the reward model's max_position_embeddings = 256"),
    ({"template": NO_SUMS + OTHER_TEMPLATE}, "the chat template refuses messages with roles .*: no sums"),
    ({"tokenizer": lambda content: content[:-9]}, "the tokenizer in .*reward cannot be loaded: "),
]  # fmt: skip


@pytest.mark.parametrize("given, text", REFUSED)
def test_what_would_give_wrong_scores_is_refused_before_the_run(make_tokens, given, text):
    with pytest.raises(ConfigError, match=rf"^roles.{given.get('role', 'reward_model')}.path: .*{text}"):
        make_tokens(**given)


ACCEPTED = [
    {"head": WEIGHT},
    {"head": WEIGHT | ONE, "config": LLAMA},
    {"head": WEIGHT | ONE, "role": "reward_server"},
    {"config": LLAMA, "role": "reward_server"},
    {"tokenizer": swapped, "data": {"max_prompt_tokens": 200}},  # its own tokens may be fewer
]


@pytest.mark.parametrize("given", ACCEPTED)
def test_what_gives_right_scores_is_accepted(make_tokens, given):
    make_tokens(**given)


def test_a_sample_that_the_reward_model_cannot_read_is_named(make_tokens, sample_of):
    tokens = make_tokens()
    short, long = sample_of("three"), sample_of("3" * 250, index=5)
    text = (
        r"^sample 5 of group 4 has \d+ tokens for the reward model, more than its context of 256 \(roles.reward_model"
    )
    with pytest.raises(RunError, match=text):
        tokens.encode([short, long])
    short.token_ids[-2] = 448
    with pytest.raises(RunError, match="^sample 0 of group 4 has token 448, but the reward model has 448 tokens"):
        tokens.encode([short])


def test_messages_that_its_template_refuses_are_named(make_tokens, sample_of):
    sample, tokens = sample_of("three"), make_tokens(template=NO_SYSTEM + OTHER_TEMPLATE)
    sample.prompt.messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    with pytest.raises(RunError, match="^sample 0 of group 4: roles.reward_model.path: .* no system here"):
        tokens.encode([sample])


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_an_error_of_who_gave_it(sample_of, score):
    tokens = SimpleNamespace(encode=lambda samples: [sample.token_ids.tolist() for sample in samples])
    answers = [("the reward model", 0.5), ("reward server 1 (URL)", score)]
    model = RewardModel(tokens, lambda token_ids: lambda: answers, [])
    first, second = model.start_score([sample_of("a"), sample_of("b", index=3)])()
    assert (first.value, first.error, second.value) == (0.5, None, None) and first.seconds == second.seconds > 0
    assert second.error.startswith(
        f"reward server 1 (URL): the score of sample 3 of group 4 is {score:g}, which is not"
    )


def test_a_servers_answer_is_one_number():
    assert read_score("URL", [0.25]) == 0.25 and math.isnan(read_score("URL", [None]))
    with pytest.raises(RunError, match="^URL gave 64 numbers for a sequence, and a reward model has one score"):
        read_score("URL", [0.0] * 64)
