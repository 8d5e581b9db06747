"""Rows as one stream of tokens without padding: micro-batches, borders, ranks that share tokens."""
