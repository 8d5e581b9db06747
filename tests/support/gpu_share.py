"""What a test's vLLM takes of a GPU: a part that it need not measure, which tests beside it would disturb."""

ROLLOUT = "actor_rollout_ref.rollout"
VLLM_SHARE = {
    f"{ROLLOUT}.gpu_memory_utilization": 0.1,
    f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 2**30,
}
IN_WORDS = tuple(f"{key}={value}" for key, value in VLLM_SHARE.items())
