"""The one place that knows model families: what a model type is, what was proven of it, what it lacks.

- `families.py` is the table: a row for each model_type. Whoever asks something of a model asks its row:
  checks, memory estimate, both training strategies, adapters, rollout engines, the page of models.
- `config_json.py` reads a config.json, also with model.override_config (`overridden.py`) and with what
  transformers takes for keys that are absent (`config_values.py`, whose .json is made of transformers).
- `sizes.py` says what follows of it: heads, experts, layers that have some.
- `trained.py` says whether a strategy trains the model of a config.json, and why not; `adapters.py` which
  parts have LoRA adapters.

A new family is its row, and `PYTHONPATH=tests/support python tests/support/config_values.py` for its
defaults; the suites take it from there. Nothing here needs torch, transformers or a configuration.
"""
