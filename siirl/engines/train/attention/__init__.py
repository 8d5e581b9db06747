"""Attention over packed rows: kernels, prompts that rows share, sinks, sequences that ranks share."""
