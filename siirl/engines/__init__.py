"""Engines that train and engines that sample, and the way of weights between them (`weights/`)."""
