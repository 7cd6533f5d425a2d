"""Tiny random models of many families, and a tokenizer, all made offline."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

BASE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GQA = dict(num_key_value_heads=2)

CAUSAL: dict[str, tuple[type, dict[str, Any]]] = {
    "Llama": (hf.LlamaConfig, GQA),
    "Mistral": (hf.MistralConfig, GQA | dict(sliding_window=8)),
    "Qwen2": (hf.Qwen2Config, GQA),
    "Qwen3": (hf.Qwen3Config, GQA | dict(head_dim=16)),
    "Gemma2": (hf.Gemma2Config, GQA | dict(head_dim=8, sliding_window=8)),
    "Gemma3": (hf.Gemma3TextConfig, GQA | dict(head_dim=8, sliding_window=8, sliding_window_pattern=2)),
    "GPT2": (hf.GPT2Config, dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)),
    "GPTNeoX": (hf.GPTNeoXConfig, {}),
    "OPT": (hf.OPTConfig, dict(ffn_dim=64, word_embed_proj_dim=32)),
    "Phi3": (hf.Phi3Config, GQA),
    "OLMo2": (hf.Olmo2Config, GQA),
    "GPTOSS": (
        hf.GptOssConfig,
        GQA | dict(head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8),
    ),
    "GPTJ": (hf.GPTJConfig, dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4, n_inner=64)),
}
UNROUTED = {
    "Bloom": (hf.BloomConfig, dict(n_layer=2, n_head=4)),
    "Falcon": (hf.FalconConfig, dict(num_kv_heads=4)),
    "MPT": (hf.MptConfig, dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64)),
    "GPTNeo": (hf.GPTNeoConfig, dict(num_layers=2, num_heads=4, attention_types=[[["global"], 2]])),
}


def causal(
    family: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float32, gain: float = 8, **changes: Any
) -> Any:
    """A tiny random causal language model on sdpa, where the family allows it, in eval mode."""
    config_type, extra = (CAUSAL | UNROUTED)[family]
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config_type(**(BASE | extra | changes)), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger weights than at initialization: attention far from uniform makes wrong routes visible.
            if parameter.ndim > 1:
                parameter.mul_(gain)
    return model.eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 0, vocab: int = 64) -> torch.Tensor:
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """A character tokenizer of 64 ids with pad, bos and eos."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "?": 3}
    for char in " abcdefghijklmnopqrstuvwxyz.,;:'\"!()-\n0123456789ABCDEFGHIJKLM"[: 64 - 4]:
        vocabulary.setdefault(char, len(vocabulary))
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="?"
    )
