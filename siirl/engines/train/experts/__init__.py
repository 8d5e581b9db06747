"""Mixtures of experts: products, ranks that have some each, adapters, the routers' loss and replay."""
