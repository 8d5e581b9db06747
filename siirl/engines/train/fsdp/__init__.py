"""The FSDP2 strategy: a model of one role sharded over its ranks, and products in FP8, which it alone has."""
