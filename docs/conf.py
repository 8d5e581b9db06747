"""The documentation as a site: `make site`. Pages are those of this folder; index.md has their order."""

import posixpath
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes

project = "siirl"
copyright = "siirl contributors"
version = release = version_of("siirl")
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
root_doc = "index"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
highlight_language = "text"
html_title = f"siirl {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = sorted(str(picture) for picture in Path(__file__).parent.glob("view_*.png"))
copybutton_prompt_text = "$ "


SEARCHED = {
    "adapter": ["lora"],
    "advantage estimator": ["algorithms"],
    "async": ["async"],
    "asynchronous": ["async"],
    "benchmark": ["evidence/gpu"],
    "best checkpoint": ["glossary"],
    "checkpoint": ["checkpoints"],
    "colocated": ["backends", "tuning", "async"],
    "context parallel": ["backends"],
    "credit": ["multi_agent"],
    "critic": ["algorithms"],
    "curriculum": ["algorithms"],
    "dashboard": ["view"],
    "dataset": ["data"],
    "disaggregated": ["async", "backends"],
    "docker": ["install"],
    "DPO": ["given_responses"],
    "dynamic sampling": ["algorithms"],
    "early stopping": ["troubleshooting"],
    "elastic": ["launch"],
    "entropy": ["algorithms", "troubleshooting"],
    "FP8": ["tuning"],
    "FSDP": ["backends"],
    "GRPO": ["algorithms", "your_task"],
    "hang": ["troubleshooting"],
    "hybrid engine": ["glossary"],
    "importance sampling": ["algorithms"],
    "KL": ["algorithms"],
    "knowledge distillation": ["distillation"],
    "kubernetes": ["launch"],
    "learning rate": ["keys", "troubleshooting"],
    "LLM as a judge": ["rewards"],
    "LoRA": ["lora"],
    "max_lag": ["async"],
    "MCP": ["tools"],
    "Megatron": ["backends"],
    "metrics": ["metrics"],
    "MoE": ["backends", "models"],
    "multi-agent": ["multi_agent"],
    "multi-turn": ["environments", "multi_agent", "tutorials/tools"],
    "Muon": ["backends"],
    "off-policy": ["async"],
    "OOM": ["troubleshooting", "tuning"],
    "out of memory": ["troubleshooting", "tuning"],
    "overfitting": ["troubleshooting"],
    "packing": ["tuning"],
    "PPO": ["algorithms"],
    "preemption": ["checkpoints"],
    "profile": ["observability"],
    "Ray": ["launch"],
    "reasoning-gym": ["environment_packages"],
    "resume": ["checkpoints"],
    "reward function": ["rewards", "tutorials/reward"],
    "reward hacking": ["troubleshooting", "rewards", "given_responses"],
    "reward model": ["rewards", "given_responses"],
    "rollout correction": ["async", "algorithms_reference"],
    "router replay": ["backends"],
    "sandbox": ["security", "rewards"],
    "self-distillation": ["distillation"],
    "self-play": ["multi_agent"],
    "sequence packing": ["tuning"],
    "sequence parallel": ["backends"],
    "SFT": ["given_responses"],
    "SGLang": ["backends"],
    "slurm": ["launch"],
    "staleness": ["async"],
    "tensor parallel": ["backends"],
    "throughput": ["tuning"],
    "Tinker": ["serve"],
    "tool calling": ["environments", "tutorials/tools"],
    "train-inference mismatch": ["troubleshooting"],
    "TRL": ["given_responses", "evidence/peers"],
    "Ulysses": ["backends"],
    "verl": ["migration", "tutorials/verl"],
    "vision": ["vision"],
    "vLLM": ["backends"],
    "VLM": ["vision"],
    "wandb": ["view"],
    "weight sync": ["backends", "tuning"],
}
"""What readers type into the search -> the pages that it must show first. The search itself ranks a page that
says a word once as high as one that is about it."""


def add_searched_words(app, docname, source):
    """Main entries of the index, which the search ranks before all else."""
    words = [word for word, pages in SEARCHED.items() if docname in pages]
    title, _, text = source[0].partition("\n")
    entries = "".join(f"\n```{{index}} ! single: {word}\n```\n" for word in words)
    source[0] = f"{title}\n{entries}{text}"


def name_files_of_the_repository(app, doctree):
    """What lies outside of this folder is no page: a link to it becomes its path."""
    for link in list(doctree.findall(nodes.reference)):
        target = link.get("refuri", "")
        if target.startswith("../"):
            path = posixpath.normpath(target.removeprefix("../"))
            link.replace_self(nodes.literal(text=path))


def setup(app):
    """Sphinx's entry."""
    app.connect("source-read", add_searched_words)
    app.connect("doctree-read", name_files_of_the_repository)
