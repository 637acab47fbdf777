"""A tiny model and one real SGLang server for all rollout tests of the session."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megarl.rollout.server import Server

VOCABULARY = 448
CONTEXT = 256


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random two-layer Qwen2 in float32 with a ChatML tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-qwen2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{a} plus {b} is {a + b}" for a in range(40) for b in range(40)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
            bos_token_id=None,
        )
    )
    for parameter in model.parameters():  # the default initialisation is too flat to tell two models apart
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_server(model_folder, tmp_path_factory):
    server = Server(
        model_path=str(model_folder),
        dtype="float32",
        device="cpu",
        tensor_parallel=1,
        port=None,
        server_args={},
        log_path=tmp_path_factory.mktemp("server") / "server.log",
        start_timeout_s=400,
    )
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
