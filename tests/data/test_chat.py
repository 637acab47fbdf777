"""The chat template: one BOS at most, and errors that say what is missing."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from megarl.data import chat, toy
from megarl.errors import ConfigError

USER = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"
)


def small_tokenizer(template, bos):
    """Words as tokens; with `bos` the tokenizer itself adds it to every encoded text, as add_bos_token=true does."""
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "user", "system", "hello", "go"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>" if bos else None, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def test_a_bos_in_the_template_is_not_doubled_by_the_tokenizer():
    tokenizer = small_tokenizer("{{ bos_token }}" + TEMPLATE, bos=True)
    assert tokenizer.encode("hello") == [1, 5]  # left to itself the tokenizer adds one
    assert chat.render(tokenizer, USER) == [1, 3, 5, 6]


def test_a_template_without_bos_gives_none_even_where_the_tokenizer_would_add_one():
    assert chat.render(small_tokenizer(TEMPLATE, bos=True), USER) == [3, 5, 6]


def test_a_tokenizer_without_bos_gives_none():
    assert chat.render(small_tokenizer(TEMPLATE, bos=False), USER) == [3, 5, 6]


def test_no_chat_template_is_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        chat.render(small_tokenizer(None, bos=True), USER)


def test_messages_that_the_template_refuses_are_an_error_with_its_reason():
    template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(ConfigError, match=r"roles \['system'\].*no system role here"):
        chat.render(small_tokenizer(template, bos=False), [{"role": "system", "content": "hello"}])


def test_load_tokenizer_renders_the_toy_chat(tmp_path):
    toy.make(tmp_path / "toy", seed=0)
    tokenizer = chat.load_tokenizer(tmp_path / "toy" / "model")
    ids = chat.render(tokenizer, USER)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_load_tokenizer_refuses_a_path_that_is_no_model_folder(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        chat.load_tokenizer("some/hub-name")
    with pytest.raises(ConfigError, match="no tokenizer in"):
        chat.load_tokenizer(tmp_path)


def test_load_tokenizer_refuses_one_without_template_or_end_of_turn(tmp_path):
    tokenizer = small_tokenizer(None, bos=False)
    tokenizer.save_pretrained(tmp_path / "no_template")
    with pytest.raises(ConfigError, match="no chat template"):
        chat.load_tokenizer(tmp_path / "no_template")
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "no_eos")
    with pytest.raises(ConfigError, match="no eos_token"):
        chat.load_tokenizer(tmp_path / "no_eos")
