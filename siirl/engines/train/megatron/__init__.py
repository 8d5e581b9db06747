"""The Megatron-Core strategy: one model of one role inside the process groups of its node."""
