"""LoRA: which weights train, how they merge, and the frozen base that several adapters use."""
