"""The chat template: one BOS, and errors that show what is wrong; tokenizers as they were released."""

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


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    return folder / "model"


def test_a_bos_in_the_template_is_not_doubled_by_the_tokenizer():
    """O20."""
    tokenizer = small_tokenizer("{{ bos_token }}" + TEMPLATE, bos=True)
    assert tokenizer.encode("hello") == [1, 5]  # left to itself the tokenizer adds one
    assert chat.render(tokenizer, USER) == [1, 3, 5, 6]


def test_a_template_without_bos_gets_the_one_that_the_tokenizer_puts_before_every_text():
    """O20."""
    assert chat.render(small_tokenizer(TEMPLATE, bos=True), USER) == [1, 3, 5, 6]


def test_a_bos_that_neither_tokenizer_nor_template_adds_is_not_added():
    """O20."""
    assert chat.render(small_tokenizer(TEMPLATE, bos=False), USER) == [3, 5, 6]
    tokenizer = small_tokenizer(TEMPLATE, bos=False)
    tokenizer.bos_token = "<s>"
    assert chat.render(tokenizer, USER) == [3, 5, 6]


BOS = "{{ bos_token }}"


@pytest.mark.parametrize("start", [BOS + BOS, BOS + "<s> ", " " + BOS, "\n\n<s>"])
def test_two_bos_or_one_that_is_not_the_first_is_refused_with_the_rendered_text(tmp_path, toy_model, start):
    """O20. A tokenizer keeps the space before a BOS as a token; then its own BOS would be a second one."""
    shutil.copytree(toy_model, tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": "<s>"}))
    template = tmp_path / "two.jinja"
    template.write_text(start + toy.CHAT_TEMPLATE)
    reason = "a chat template gives one <s> at the very start, or none; rendered: '.*<s>.*user"
    with pytest.raises(ConfigError, match=f"data.chat_template: {template}: {reason}"):
        chat.load_tokenizer(tmp_path / "model", str(template))


def test_a_text_that_contains_the_bos_token_is_refused():
    tokenizer = small_tokenizer(TEMPLATE, bos=True)
    turns = [*USER, {"role": "assistant", "content": "hello <s> hello"}, *USER]
    with pytest.raises(ConfigError, match="the assistant text contains <s>, the tokenizer's BOS: remove it"):
        chat.render(tokenizer, turns)


def test_no_chat_template_is_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        chat.render(small_tokenizer(None, bos=True), USER)


WRONG_TEMPLATES = [
    ("{% for m in messages %}{{ m.content }}", r"line 1 of the chat template: .*endfor"),
    ("You are wise. {{ messages | length }}", r"does not show the user's text '.*'; rendered: 'You are wise. 1'"),
    ("{{ messages[0].text }}", "does not show the user's text '.*'; rendered: ''"),
    ("{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}", "rendered: ''"),
    ("{{ raise_exception('never') }}", r"refuses messages with roles \['user'\]: never"),
    ("{{ messages[0].content + 1 }}", r"refuses messages with roles \['user'\]: can only concatenate str"),
    ("{{ messages[0].content | upper }}" + "x" * 900, "rendered: 'WHICH NUMBER FOLLOWS 7391.x+[.]{3}$"),
    ("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}", r"ends a prompt with the '\[assistant\] ' "),
]


@pytest.mark.parametrize("template, reason", WRONG_TEMPLATES)
def test_a_wrong_template_is_refused_with_the_rendered_text_or_its_reason(tmp_path, template, reason):
    small_tokenizer(template, bos=False).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"^model.path: .*{reason}"):
        chat.load_tokenizer(tmp_path / "model")
    small_tokenizer(TEMPLATE, bos=False).save_pretrained(tmp_path / "model")
    (tmp_path / "wrong.jinja").write_text(template)
    with pytest.raises(ConfigError, match=f"^data.chat_template: {tmp_path}/wrong.jinja: .*{reason}"):
        chat.load_tokenizer(tmp_path / "model", f"{tmp_path}/wrong.jinja")


USER_TURN, GO = "<|user|>{{ m.content }}", "{% if add_generation_prompt %}<|assistant|>{% endif %}"
GOOD_TEMPLATES = {  # as released models have them, in short: (the user's turn, an answer, the end)
    "llama 2": ("[INST] {{ m.content.strip() }} [/INST]", " {{ m.content }} </s>", ""),
    "phi 3": (USER_TURN + "<|assistant|>", "{{ m.content }}<|end|>", ""),
    "qwen 3": (USER_TURN, "<|assistant|><think></think>{{ m.content }}", GO),
    "deepseek r1": (USER_TURN, "<|assistant|>{{ m.content }}", GO.replace("{% endif", "<think>{% endif")),
    "llama 3 at first": (USER_TURN, "<|assistant|>{{ m.content }}", "<|assistant|>"),
    "with the date": ("{{ strftime_now('%d %b %Y') }} {{ m.content | trim }}", "{{ m.content }}", ""),
    "for one question": (USER_TURN, "{{ raise_exception('no answers') }}", ""),
    "of a base model": ("{{ m.content }}\n", "{{ m.content }}\n", ""),
}


@pytest.mark.parametrize("name", GOOD_TEMPLATES)
def test_templates_of_released_models_are_taken(tmp_path, name):
    user, answer, end = GOOD_TEMPLATES[name]
    turn = f"{{% if m.role == 'user' %}}{user}{{% else %}}{answer}{{% endif %}}"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}{end}"
    small_tokenizer(template, bos=False).save_pretrained(tmp_path / "model")
    assert "hello" in chat.render_text(chat.load_tokenizer(tmp_path / "model"), USER)


LEFT_OUT = [
    ("{% for m in messages if m.role != 'system' %}{{ m.content }} {% endfor %}", ["system", "user"]),
    ("{{ messages[-1].content }}", ["user", "assistant", "user"]),
    ("{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}", ["human", "user"]),
]


@pytest.mark.parametrize("template, roles", LEFT_OUT)
def test_a_message_that_the_template_leaves_out_is_refused_with_the_rendered_text(template, roles):
    tokenizer = small_tokenizer(template, bos=False)
    messages = [{"role": role, "content": f"hello {i}"} for i, role in enumerate(roles)]
    reason = f"leaves out the {roles[0]} text 'hello 0'; rendered: 'hello {len(roles) - 1}"
    with pytest.raises(ConfigError, match=reason):
        chat.render(tokenizer, messages)


def test_a_message_that_the_template_shows_otherwise_is_taken():
    """SmolLM3's system message is a switch, and white space around a text goes with many."""
    switch = "{% if '/no_think' in messages[0].content %}hello {% endif %}{{ messages[1].content | trim }}"
    messages = [{"role": "system", "content": "/no_think"}, {"role": "user", "content": " \n hello"}]
    assert chat.render(small_tokenizer(switch, bos=False), messages) == [5, 5]


def test_a_template_is_given_by_a_file_or_by_one_of_the_tokenizers_names(tmp_path):
    templates = {"default": TEMPLATE, "short": "{{ messages[0].content }} go"}
    small_tokenizer(templates, bos=False).save_pretrained(tmp_path / "model")
    assert chat.render(chat.load_tokenizer(tmp_path / "model"), USER) == [3, 5, 6]
    assert chat.render(chat.load_tokenizer(tmp_path / "model", "short"), USER) == [5, 6]
    (tmp_path / "twice.jinja").write_text("{{ messages[0].content }} {{ messages[0].content }}")
    assert chat.render(chat.load_tokenizer(tmp_path / "model", f"{tmp_path}/twice.jinja"), USER) == [5, 5]
    with pytest.raises(ConfigError, match="given long, which is no file; valid names: default, short, chatml"):
        chat.load_tokenizer(tmp_path / "model", "long")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match="data.chat_template: .*latin.jinja: 'utf-8' codec can't decode"):
        chat.load_tokenizer(tmp_path / "model", f"{tmp_path}/latin.jinja")


def test_chatml_needs_its_tokens_in_the_vocabulary(tmp_path, toy_model):
    own, chatml = chat.load_tokenizer(toy_model), chat.load_tokenizer(toy_model, "chatml")
    turns = [{"role": "system", "content": " a\n"}, *USER, {"role": "assistant", "content": "b"}, *USER]
    assert chat.render(chatml, turns) == chat.render(own, turns)
    small_tokenizer(None, bos=False).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"given chatml, but <\|im_start\|> is no token in the vocabulary of .*model"):
        chat.load_tokenizer(tmp_path / "model", "chatml")


def test_a_tokenizer_without_template_takes_a_given_one(tmp_path):
    small_tokenizer(None, bos=False).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="has no chat template; data.chat_template gives it one: a file, or chatml"):
        chat.load_tokenizer(tmp_path / "model")
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    assert chat.render(chat.load_tokenizer(tmp_path / "model", f"{tmp_path}/own.jinja"), USER) == [3, 5, 6]


def test_messages_that_the_template_refuses_are_an_error_with_its_reason():
    template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(ConfigError, match=r"roles \['system'\].*no system role here"):
        chat.render(small_tokenizer(template, bos=False), [{"role": "system", "content": "hello"}])


def test_load_tokenizer_renders_the_toy_chat(toy_model):
    tokenizer = chat.load_tokenizer(toy_model)
    ids = chat.render(tokenizer, USER)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_load_tokenizer_refuses_a_path_that_is_no_model_folder(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        chat.load_tokenizer("some/hub-name")
    with pytest.raises(ConfigError, match="no tokenizer in"):
        chat.load_tokenizer(tmp_path)


def test_load_tokenizer_refuses_one_without_end_of_turn(tmp_path):
    tokenizer = small_tokenizer(TEMPLATE, bos=False)
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


def test_a_sentencepiece_model_puts_one_bos_before_a_template_without_it(tmp_path):
    """O20. Its tokenizer_config.json says add_bos_token."""
    model = train_sentencepiece(tmp_path / "model")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}I:")
    tokenizer = chat.load_tokenizer(tmp_path / "model", f"{tmp_path}/plain.jinja")
    assert chat.render(tokenizer, USER) == [model.bos_id(), *model.encode("user: hello\nI:")]


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


def test_a_tokenizer_json_is_not_changed_by_the_class_that_is_named_beside_it(tmp_path, toy_model):
    """DeepSeek's distilled models have a byte-level tokenizer.json under the name LlamaTokenizerFast."""
    before = chat.render(chat.load_tokenizer(toy_model), USER)
    shutil.copytree(toy_model, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    tokenizer = chat.load_tokenizer(tmp_path / "model")
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
