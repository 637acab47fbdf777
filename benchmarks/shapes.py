"""The config.json of the models that the benchmarks measure; weights are random, so nothing is downloaded."""

import json
from pathlib import Path

_QWEN = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_cache": True,
    "use_sliding_window": False,
}
_QWEN2 = _QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

# Qwen2.5's numbers are those of the Instruct models on the Hugging Face hub.
_QWEN2_5 = _QWEN2 | {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}

_QWEN3_MOE = _QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

SHAPES = {
    "qwen2.5-0.5b": _QWEN2_5
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": _QWEN2_5
    | {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": _QWEN2_5
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": _QWEN2_5
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "qwen2.5-32b": _QWEN2_5
    | {
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    },
    "tiny": _QWEN2
    | {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}


def write_random_model(shape: str, folder: str, dtype: str) -> None:
    """An HF folder of config.json and safetensors; on a GPU where there is one, since billions of numbers take a minute else."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.manual_seed(1)
    skipped = "lm_head.weight" if SHAPES[shape]["tie_word_embeddings"] else None
    for index, (name, meta) in enumerate(model.state_dict().items()):
        if name != skipped:
            tensor = torch.empty(meta.shape, dtype=getattr(torch, dtype), device=device)
            tensor = tensor.normal_(0.0, 0.02) if tensor.dim() > 1 else tensor.fill_(1.0)
            save_file({name: tensor.cpu()}, Path(folder, f"model-{index:05d}.safetensors"), metadata={"format": "pt"})
