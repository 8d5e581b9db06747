"""From launch scripts and YAML files of siiRL and verl to a command of siirl; nothing of them is executed."""
