"""A toy that learns on two CPU cores: a model of 128 k parameters, its tokenizer, and one-step word problems.

The answers of the warm start work the sum out in 30 % of the rows ("3 + 4 = 7") and guess in the others ("I guess 9").
What RL then learns is to work the answer out instead of guessing; the arithmetic itself comes from the warm start.
Preferences are for the answer worked out, against a wrong result or a wrong guess.
"""

import json
import os
import random
import shutil
import uuid
import zlib
from pathlib import Path

from megarl.errors import ConfigError

FORMAT_VERSION = 2  # of the folder's content: a folder of another version is refused, not mixed
FILES = (
    "toy.json",
    "train.jsonl",
    "validation.jsonl",
    "warm_start.jsonl",
    "preferences.jsonl",
    "preferences_validation.jsonl",
    "model/config.json",
    "model/generation_config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
)

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # token ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Qwen2's own: transformers imposes it on every tokenizer that lies beside a Qwen2 config. Each digit is one token.
QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_TOKENIZER_TOKENS = 400  # training stops at 393, when every word of the task is one token

MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 448,  # more than the tokenizer has, as in released Qwen2 models
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "pad_token_id": 0,
}

NAMES = ("Anna", "Ben", "Carl", "Dana", "Emma", "Leo", "Mia", "Tom")
ITEMS = ("apples", "books", "cards", "coins", "pens", "stones")
PLUS = (
    "{name} has {a} {items} and buys {b} more. How many {items} does {name} have now?",
    "{name} has {a} {items} and finds {b} more. How many {items} does {name} have now?",
    "{name} has {a} {items} and is given {b} more. How many {items} does {name} have now?",
    "{name} has {a} {items} and {other} has {b}. How many {items} do they have together?",
)
MINUS = (
    "{name} has {a} {items} and gives {b} to {other}. How many {items} are left?",
    "{name} has {a} {items} and loses {b}. How many {items} are left?",
    "There are {a} {items} in a box. {name} takes {b} from the box. How many {items} are left?",
    "{name} has {a} {items} and {other} has {b}. How many more {items} does {name} have?",
)
NUM_TRAIN, NUM_VALIDATION = 4096, 512  # rows; the warm start has all questions that are not held out, 15,225
WORKED_SHARE = 0.3
REJECTED_WORKED_SHARE = 0.5  # of the rejected answers: worked out, with a wrong result
LARGEST_GUESS_ERROR = 4


def make(folder: str | Path, seed: int) -> None:
    """Write the toy into `folder`: model/ and the JSONL files of FILES. Same seed, same bytes.

    Returns at once where the folder holds the toy of this seed. It is written beside the folder and renamed, so a
    killed call leaves no half folder. Raises ConfigError where the folder holds anything else.
    """
    folder = Path(folder)
    if _is_complete(folder, seed):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        (partial / "model").mkdir(parents=True)
        _write_data(partial, seed)
        _write_tokenizer(partial / "model")
        _write_model(partial / "model", seed)
        _write_json(partial / "toy.json", {"seed": seed, "format_version": FORMAT_VERSION})
        try:
            os.rename(partial, folder)
        except OSError:
            if not _is_complete(folder, seed):  # else: another process made the same toy in the meantime
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def all_problems() -> list[dict]:
    """Every word problem, in a fixed order: question, the worked reply, and the answer as an int."""
    problems = []
    for a in range(2, 10):
        for b in range(1, a + 1):
            for index, name in enumerate(NAMES):
                words = {"a": a, "b": b, "name": name, "other": NAMES[(index + 1) % len(NAMES)]}
                for items in ITEMS:
                    for template in PLUS:
                        question = template.format(items=items, **words)
                        problems.append({"question": question, "worked": f"{a} + {b} = {a + b}", "answer": a + b})
                    for template in MINUS:
                        question = template.format(items=items, **words)
                        problems.append({"question": question, "worked": f"{a} - {b} = {a - b}", "answer": a - b})
    return problems


def is_held_out(question: str) -> bool:
    """One question in ten, whatever the seed."""
    return zlib.crc32(question.encode()) % 10 == 0


def write_gsm8k_like(path: str | Path, num_rows: int, seed: int) -> None:
    """Two-step word problems in GSM8K's own format, {"question", "answer"} with `<<a*b=c>>` steps and a last line
    `#### N`: a stand-in for tests on machines without GSM8K. Same seed, same bytes."""
    generator = random.Random(f"gsm8k-like:{seed}")
    rows = []
    for _ in range(num_rows):
        name, items = generator.choice(NAMES), generator.choice(ITEMS)
        boxes, each = generator.randint(2, 40), generator.randint(2, 60)
        total = boxes * each
        given = generator.randint(1, total)
        question = (
            f"{name} has {boxes} boxes with {each} {items} each. {name} gives {given} {items} to a friend. "
            f"How many {items} does {name} have left?"
        )
        answer = (
            f"{name} starts with {boxes}*{each} = <<{boxes}*{each}={total}>>{total} {items}.\n"
            f"After the gift there are {total}-{given} = <<{total}-{given}={total - given}>>{total - given} {items}.\n"
            f"#### {total - given}"
        )
        rows.append({"question": question, "answer": answer})
    _write_jsonl(Path(path), rows)


def _is_complete(folder: Path, seed: int) -> bool:
    """True: the toy of this seed. False: nothing there, or an empty folder. Anything else is a ConfigError."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / "toy.json").is_file():
        raise ConfigError(f"toy.folder: {folder} exists and is not a toy folder (no toy.json): give another path")
    try:
        made = json.loads((folder / "toy.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"toy.folder: {folder}/toy.json cannot be read ({error}): give another path") from error
    wanted = {"seed": seed, "format_version": FORMAT_VERSION}
    if made != wanted:
        raise ConfigError(f"toy.folder: {folder} was made with {made}, wanted {wanted}: remove it or give another path")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"toy.folder: {folder} lacks {', '.join(missing)}: remove it, it will be made again")
    return True


def _write_data(folder: Path, seed: int) -> None:
    generator = random.Random(f"toy:{seed}")
    problems = all_problems()
    generator.shuffle(problems)
    train, held_out, warm_start = [], [], []
    for problem in problems:
        if is_held_out(problem["question"]):
            held_out.append(problem)
            continue
        train.append(problem)
        guess = generator.choice(_guesses(problem))
        is_worked = generator.random() < WORKED_SHARE
        response = problem["worked"] if is_worked else f"I guess {guess}"
        warm_start.append({"question": problem["question"], "response": response})
    generator.shuffle(warm_start)
    _write_jsonl(folder / "warm_start.jsonl", warm_start)
    generator = random.Random(f"toy preferences:{seed}")
    for problems, answers, preferences in (
        (train[:NUM_TRAIN], "train.jsonl", "preferences.jsonl"),
        (held_out[:NUM_VALIDATION], "validation.jsonl", "preferences_validation.jsonl"),
    ):
        rows = [{"question": problem["question"], "answer": str(problem["answer"])} for problem in problems]
        _write_jsonl(folder / answers, rows)
        _write_jsonl(folder / preferences, [_preference(problem, generator) for problem in problems])


def _preference(problem: dict, generator: random.Random) -> dict:
    """The worked answer against a wrong one."""
    wrong = generator.choice([guess for guess in _guesses(problem) if guess != problem["answer"]])
    is_worked = generator.random() < REJECTED_WORKED_SHARE
    rejected = problem["worked"].replace(f"= {problem['answer']}", f"= {wrong}") if is_worked else f"I guess {wrong}"
    return {"question": problem["question"], "chosen": problem["worked"], "rejected": rejected}


def _guesses(problem: dict) -> range:
    return range(max(0, problem["answer"] - LARGEST_GUESS_ERROR), problem["answer"] + LARGEST_GUESS_ERROR + 1)


def _write_tokenizer(folder: Path) -> None:
    """Byte-level BPE trained on every question and reply of the task, the same for every seed."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_TOKENIZER_TOKENS,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = []
    for problem in all_problems():
        texts += ["user", problem["question"], "assistant", problem["worked"], f"I guess {problem['answer']}"]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": [TURN_START, TURN_END],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_model(folder: Path, seed: int) -> None:
    """config.json and seeded weights under Hugging Face names: normal with std 0.02, norms 1, biases 0, tied head."""
    import numpy as np
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(MODEL_CONFIG).items():
        if name.endswith("norm.weight"):
            weights[name] = np.ones(shape, dtype=np.float32)
        elif name.endswith(".bias"):
            weights[name] = np.zeros(shape, dtype=np.float32)
        else:
            scale = np.float32(MODEL_CONFIG["initializer_range"])
            weights[name] = generator.standard_normal(shape, dtype=np.float32) * scale
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", MODEL_CONFIG)
    eos, pad = MODEL_CONFIG["eos_token_id"], MODEL_CONFIG["pad_token_id"]
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": pad})


def weight_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every weight of a Qwen2 model with tied embeddings."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[prefix + "mlp.gate_proj.weight"] = (intermediate, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (intermediate, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, intermediate)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
