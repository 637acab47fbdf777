"""Models and prompts of a throughput run: random weights of a real shape, prompts of one length."""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

from shapes import SHAPES, write_random_model
from weight_sync import in_child

from megarl.data import toy
from megarl.data.chat import load_tokenizer, render
from megarl.errors import ConfigError

TOY = "toy"  # the quickstart's model of 128 k parameters, for CPUs
DUMMIES = (TOY, *(name for name, shape in SHAPES.items() if shape["vocab_size"] >= toy.MAX_TOKENIZER_TOKENS))
NUM_WORDS = 100  # that prompts are made of


def dummy_model(name: str, folder: Path, dtype: str) -> Path:
    """A folder of random weights with the toy's tokenizer; written unless it is there."""
    if name == TOY:
        toy.make(folder / TOY, seed=0)
        return folder / TOY / "model"
    model = folder / f"{name}-{dtype}"
    if not model.exists():
        partial = Path(tempfile.mkdtemp(dir=folder))
        in_child(write_random_model, name, str(partial), dtype)
        with tempfile.TemporaryDirectory() as made:
            toy.make(made, seed=0)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(made, "model", file), partial)
        os.rename(partial, model)
    return model


def write_prompts(file: Path, number: int, length: int, model: str, chat_template: str | None, seed: int) -> None:
    """Rows of random words, each `length` tokens with the chat template around it.

    Raises ConfigError where the template alone is longer, or the tokenizer has too few words of one token.
    """
    tokenizer = load_tokenizer(model, chat_template)
    generator = random.Random(seed)
    words = words_of_one_token(tokenizer, generator)

    def tokens(words: list[str]) -> int:
        return len(render(tokenizer, [{"role": "user", "content": text_of(words)}]))

    around = tokens(words[:2]) - 2
    if length <= around:
        raise ConfigError(f"data.max_prompt_tokens={length}: the chat template alone has {around} tokens")
    rows = [generator.choices(words, k=length - around) for _ in range(number)]
    for row in rows[:10]:
        if tokens(row) != length:
            raise ConfigError(f"{model}: a prompt of {length} tokens was wanted and has {tokens(row)}")
    file.write_text("".join(json.dumps({"prompt": text_of(row), "answer": "0"}) + "\n" for row in rows))


def text_of(words: list[str]) -> str:
    """The digit is in front as a template may take a leading space away."""
    return "7" + "".join(words)


def words_of_one_token(tokenizer, generator: random.Random) -> list[str]:
    """Words with a space before them, each of which is one token wherever it stands."""
    ids = list(range(len(tokenizer)))
    generator.shuffle(ids)
    words = []
    for index in ids:
        word = tokenizer.decode([index])
        is_word = word[:1] == " " and word[1:].isascii() and word[1:].isalpha() and word.islower()
        if is_word and tokenizer.encode(word + word, add_special_tokens=False) == [index, index]:
            words.append(word)
        if len(words) == NUM_WORDS:
            break
    if len(words) < 10:
        raise ConfigError(f"{tokenizer.name_or_path}: only {len(words)} words of one token were found, 10 are needed")
    return words
