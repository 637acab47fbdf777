"""The chat template: one BOS at most, and errors that say what is missing; tokenizers as they were released."""

import importlib.resources
import io
import json
import shutil

import pytest
import sentencepiece
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


LLAMA_2_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TEXTS = [
    "Anna has 3 apples and buys 4 more. How many apples does Anna have now?",
    " one space first",
    "  two, and  two within\n\nand three last   ",
    "\ttab\r\n",
    "naïve 漢字 🎉 12.5%",
    "▁",
    " ",
    "",
]


def train_sentencepiece(folder, **options):
    """A folder with tokenizer.model alone, of Llama 2's kind unless `options` say otherwise, trained on the toy."""
    settings = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "minloglevel": 2,
    }
    texts = [text for problem in toy.all_problems()[::10] for text in (problem["question"], problem["worked"])]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **settings | options)
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": False}
    tokens |= {"tokenizer_class": "LlamaTokenizer", "chat_template": LLAMA_2_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_a_sentencepiece_folder_gives_sentencepieces_own_ids_and_texts(tmp_path):
    model = train_sentencepiece(tmp_path / "model")
    tokenizer = chat.load_tokenizer(tmp_path / "model")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (model.bos_id(), model.eos_id(), 400)
    for text in TEXTS:
        ids = model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == model.decode(ids) == text.replace("▁", " ")
    assert tokenizer.decode([*model.encode("6 + 2 = 8"), model.eos_id()], skip_special_tokens=True) == "6 + 2 = 8"


def test_a_sentencepiece_chat_is_its_special_tokens_and_the_texts_between_them(tmp_path):
    """As released Llama 2 and Mistral do, whose chats begin with <s> and the piece of a space and a bracket."""
    model = train_sentencepiece(tmp_path / "model")
    tokenizer = chat.load_tokenizer(tmp_path / "model")
    turns = [*USER, {"role": "assistant", "content": "3 + 4 = 7"}, *USER]
    user, reply = model.encode("[INST] hello [/INST]"), model.encode("[INST] hello [/INST] 3 + 4 = 7 ")
    assert chat.render(tokenizer, turns) == [model.bos_id(), *reply, model.eos_id(), model.bos_id(), *user]


def test_mistral_7bs_own_tokenizer_model_gives_the_ids_that_it_was_released_with(tmp_path):
    """The first turn of https://huggingface.co/docs/transformers/v4.40.0/chat_templating: 733 is the piece "▁["."""
    train_sentencepiece(tmp_path / "model")
    data = importlib.resources.files("mistral_common") / "data"
    shutil.copy(data / "tokenizer.model.v1", tmp_path / "model" / "tokenizer.model")
    tokenizer = chat.load_tokenizer(tmp_path / "model")
    ids = chat.render(tokenizer, [{"role": "user", "content": "Hello, how are you?"}])
    assert ids == [1, 733, 16289, 28793, 22557, 28725, 910, 460, 368, 28804, 733, 28748, 16289, 28793]


def test_a_converted_tokenizer_stays_the_same_as_tokenizer_json(tmp_path):
    train_sentencepiece(tmp_path / "model")
    tokenizer = chat.load_tokenizer(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "LlamaTokenizer"
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps(config))
    assert not (tmp_path / "saved" / "tokenizer.model").exists()
    saved = chat.load_tokenizer(tmp_path / "saved")
    assert [saved.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert chat.render(saved, USER) == chat.render(tokenizer, USER)


def test_a_tokenizer_json_is_not_changed_by_the_class_that_is_named_beside_it(tmp_path):
    """DeepSeek's distilled models have a byte-level tokenizer.json under the name LlamaTokenizerFast."""
    toy.make(tmp_path / "toy", seed=0)
    before = chat.render(chat.load_tokenizer(tmp_path / "toy" / "model"), USER)
    file = tmp_path / "toy" / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    tokenizer = chat.load_tokenizer(tmp_path / "toy" / "model")
    assert chat.render(tokenizer, USER) == before and tokenizer.decode(tokenizer.encode("two words")) == "two words"


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 320},
        {"normalization_rule_name": "nfkc"},
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
        {"user_defined_symbols": ["[REFERENCE]"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_sentencepiece_model_that_would_not_keep_its_ids_is_refused(tmp_path, options):
    train_sentencepiece(tmp_path / "model", **options)
    with pytest.raises(ConfigError, match="is no plain sentencepiece BPE.*a tokenizer.json is needed"):
        chat.load_tokenizer(tmp_path / "model")


def test_a_tokenizer_model_that_is_no_sentencepiece_model_is_refused(tmp_path):
    train_sentencepiece(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"SGVsbG8= 1\n")
    with pytest.raises(ConfigError, match="cannot be loaded: .*tokenizer.model"):
        chat.load_tokenizer(tmp_path / "model")
