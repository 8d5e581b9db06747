"""How large an engine's KV cache in host memory is."""

from transformers import PretrainedConfig

from siirl.models.sizes import head_size

MAX_CPU_CACHE_BYTES = 4 << 30
ROWS_BESIDE = 8
"""Rows that a cache has room for besides those that run at once."""
NUMBER_BYTES = 4


def cache_bytes_per_token(hf_config: PretrainedConfig) -> int:
    """Bytes of a token's keys and values in all layers, in float32, of which a CPU's cache is at most."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = head_size(text.to_dict())
    return 2 * text.num_hidden_layers * heads * head_dim * NUMBER_BYTES


def cached_tokens(max_num_seqs: int, row_tokens: int) -> int:
    """Tokens of a cache that holds max_num_seqs of the longest rows, and ROWS_BESIDE."""
    return (max_num_seqs + ROWS_BESIDE) * row_tokens
