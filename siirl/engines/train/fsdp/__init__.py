"""The FSDP2 strategy: a model of one role sharded over its ranks, and matmuls in FP8, which it alone has."""
