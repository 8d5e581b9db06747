"""`siirl migrate` reads a launch script as bash runs it: every script here is also given to bash."""

import os
import random
import shlex
import subprocess
import sys

import pytest

from siirl.config import load_config
from siirl.config.aliases import ALIASES
from siirl.config.root import all_keys
from siirl.errors import ConfigError
from siirl.migrate.foreign_files import read_source
from siirl.migrate.script import read_script

pytestmark = pytest.mark.heavy

TRAINING = "python3 -m verl.trainer.main_ppo"
FAKE = 'python3() { shift 2; printf "%s\\0" "$@"; }\nray() { return 1; }\n'
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "~", "GIVEN": "from outside"}

SNIPPETS = {
    "continuation": r"""X=1
TRAIN \
  a.b=$X \
  c.d='x y' $@
""",
    "array": r"""A=(
  a.b=1 # first
  # none
  "c.d=['x', 'y']"
)
A+=(e=2)
TRAIN "${A[@]}" "$@" "${#A[@]}" "${A[1]}" """,
    "eval": r"""V='two words'
CMD=(TRAIN a.b=\$W c='q' d='["x","y"]' e="\"\$V\"")
W=late
eval "${CMD[@]}" "$@" """,
    "defaults": r"""A=${A:-one}
B=${GIVEN:-two}
C=${A:+set}
D=${NONE-x}
E=${E:=kept}
TRAIN $A "$B" $C $D $E ${E}s""",
    "nested defaults": r"""N=${N:-${M:-$((2 * 4))}}
P=${P:-"${HOME}/x"}
TRAIN n=$N p=$P""",
    "arithmetic": r"""a=3
b=$(((a + 4) * 2))
c=$(($a * b / 5))
d=$((-7 / 2)) e=$((-7 % 3))
TRAIN $b $c $d $e $((1024 * ${a} - 1))""",
    "cuts": r"""F=/a/b/model.tar.gz
TRAIN ${F##*/} ${F%.*} ${F%%.*} ${F#*/} "${F,,}" ${#F} ${F^^}""",
    "case": r"""M=tv
case $M in
  kl) C=1 ;;
  t*|x) C=2 ;;
  *) exit 1 ;;
esac
TRAIN c=$C""",
    "if": r"""N=2
if [ "$N" -gt 1 ] && [ -n "$GIVEN" ]; then X=many
elif [ $N = 1 ]; then X=one
else X=none; fi
if [[ "$N" == "3" ]]; then X=three; fi
[ -z "$NONE" ] && Y=empty
[ "$N" != 2 ] || Z=two
TRAIN x=$X y=$Y z=$Z""",
    "function": r"""run() {
  local l=$1; shift
  TRAIN l=$l "$@"
}
other() { return 1; }
other
run a b "c d" """,
    "loop": r"""while ! ray status; do break; done
for i in 1 2; do :; done
TRAIN a=1 2>&1 | cat""",
    "heredoc": r"""cat > /dev/null <<'EOF'
TRAIN no="
EOF
TRAIN yes=1""",
    "quotes": r"""A='a"b' B="c'd" C=e\ f D="g\"h\$i"
TRAIN "$A" "$B" "$C" "$D" 'j'"k"l $A$B "" x""",
    "splitting": r"""A="x=1   y=2"
TRAIN $A "$A" z$A""",
    "braces": r"""H={your_home}
TRAIN a=$H/x b=${H}/y""",
    "newline in a word": r"""TRAIN a=[1,\
2] b=3""",
    "positional": r"""E=${1:-none}
TRAIN e=$E n=$# all=$*""",
    "semicolons": "export A=1; export B=2 C=3; TRAIN $A $B $C; :",
    "background": "sleep 0 & TRAIN a=1",
    "literal quotes": r"""R="token,seq"
TRAIN r=\'${R}\' s='["a"]' """,
    "called late": r"""CMD=(TRAIN n=\$N)
main() { export N=${N:-8}; if [ "$N" = 8 ]; then eval "${CMD[@]}" "$@"; fi; }
main "$@" """,
}


def by_bash(script: str, *arguments: str) -> list[str]:
    command = ["bash", "-c", FAKE + script, "script", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=20, check=False)
    return run.stdout.rstrip("\n").split("\0")[:-1] if "\0" in run.stdout else []


def by_us(script: str, *arguments: str) -> list[str]:
    return list(read_script(script, ENVIRONMENT, arguments).arguments)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_script_is_read_as_bash_runs_it(name):
    script = SNIPPETS[name].replace("TRAIN", TRAINING)
    assert by_us(script, "p=1", "q r") == by_bash(script, "p=1", "q r") != []


def hidden(draw: random.Random, name: str, value: str, lines: list[str]) -> str:
    """A word of bash for name=value, whose value may come from variables that `lines` set."""
    how = draw.choice(("plain", "double", "variable", "default", "arithmetic", "halves"))
    variable = f"V_{len(lines)}"
    if how == "arithmetic" and value.isdigit() and not value.startswith("0"):
        part = draw.randint(1, 9)
        lines.append(f"{variable}=$(({int(value) // part} * {part} + {int(value) % part}))")
        return f"{name}=${{{variable}}}"
    if how in ("variable", "halves"):
        cut = draw.randint(0, len(value)) if how == "halves" else len(value)
        lines.append(f"{draw.choice(('', 'export '))}{variable}={shlex.quote(value[:cut])}")
        return f'"{name}=${{{variable}}}"{shlex.quote(value[cut:]) if value[cut:] else ""}'
    if how == "default" and not set(value) & set("'\"\\}{$`"):
        lines.append(f'{variable}="${{{variable}:-{value}}}"')
        return f'{name}="${variable}"'
    if how == "double" and not set(value) & set('"$`\\!'):
        return f'{name}="{value}"'
    return shlex.quote(f"{name}={value}")


def random_script(draw: random.Random, settings: list[tuple[str, str]]) -> str:
    lines: list[str] = []
    words = [hidden(draw, name, value, lines) for name, value in settings]
    style = draw.choice(("plain", "arrays", "eval", "function"))
    if style == "eval":
        body = "\n".join(f"    {shlex.quote(word)}" for word in words)
        return "\n".join([*lines, f"CMD=(\n    {TRAINING}\n{body}\n)", 'eval "${CMD[@]}" "$@"'])
    if style == "arrays":
        cut = draw.randint(0, len(words))
        arrays = [f"A=(\n  # all\n  {' '.join(words[:cut])}\n)", "B=(" + "\n".join(words[cut:]) + ")"]
        return "\n".join([*lines, *arrays, f'{TRAINING} "${{A[@]}}" \\\n "${{B[@]}}" $@'])
    command = f"{TRAINING} \\\n  " + " \\\n  ".join([*words, '"$@"'])
    if style == "function":
        return "\n".join([*lines, f"main() {{\n  {command} 2>&1 | cat\n}}", 'main "$@"'])
    return "\n".join([*lines, command])


def random_value(draw: random.Random) -> str:
    texts = (
        "a b",
        "it's",
        'say "no"',
        "x$y",
        "`z`",
        "a\\b",
        "{h}/d",
        "~/x",
        "[a,b]",
        "['p q','r']",
        "",
        "e!",
        "1e-6",
    )
    return draw.choice((str(draw.randint(0, 9999)), draw.choice(texts), "True"))


@pytest.mark.parametrize("seed", range(60))
def test_a_random_script_is_read_as_bash_runs_it(seed):
    draw = random.Random(seed)
    settings = [(f"g.k{place}", random_value(draw)) for place in range(draw.randint(1, 12))]
    script = random_script(draw, settings)
    words = by_us(script, "more=1")
    assert words == by_bash(script, "more=1"), script
    assert words == [*(f"{name}={value}" for name, value in settings), "more=1"], script


PROBES = {
    "an NPU": ("$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)", False),
    "a host": ("$(hostname)", True),
}
BY_DEVICE = """D=${D:-PROBE}
case "$D" in
  gpu | npu) ;;
  *) exit 1 ;;
esac
if [ "$D" = npu ] && [ "$E" = x ]; then exit 1; fi
case "$D" in
  gpu) N=8 ;;
  npu) N=16 ;;
esac
A=(  # by device
  n=$N device=$D)
if [ "$D" = npu ]; then A+=(offload=True); else A+=(offload=False); fi
L=(python3)
if [ "${UV:-1}" != 0 ] && [ "${D:-gpu}" = gpu ] && { [ "$E" = x ] || [ "$E" = "" ]; }; then
  L=(uv run python3)
fi
"${L[@]}" -m verl.trainer.main_ppo "${A[@]}" d=$PWD/x
"""


@pytest.mark.parametrize("probe", PROBES)
def test_what_only_a_machine_knows_is_read_as_one_device_throughout(probe):
    """Also where one condition is a case and the next an if; what was taken for what is said."""
    command, said = PROBES[probe]
    launch = read_script(BY_DEVICE.replace("PROBE", command), {})
    assert launch.arguments == ("n=8", "device=gpu", "offload=False", "d=./x")
    assert launch.variables.guesses == ([f"{command}: read as 'gpu'"] if said else [])


def test_a_condition_that_is_not_known_and_sets_something_is_said():
    script = f"""if nvidia-smi --query; then X=1; fi
if [ "$(hostname)" != a ]; then Y=2; else Y=3; fi
if ! pip show x; then pip install x; fi
{TRAINING} x=$X y=$Y"""
    launch = read_script(script, {})
    assert launch.arguments == ("x=1", "y=2")
    assert [guess.partition(": ")[0] for guess in launch.variables.guesses] == [
        "nvidia-smi --query",
        "[ $(hostname) != a ]",
    ]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "no training command"),
        *(
            (f"{opening}\n{TRAINING} a=1", f"within '{word}': '{closing}' is missing")
            for opening, word, closing in (
                ("case x in\n x) if true; then X=1\n ;;\nesac", "if", "fi"),
                ("case x in\n x) X=1 ;;\n", "case", "esac"),
                ("f() { X=1", "{", "}"),
            )
        ),
        (f"exit 1\n{TRAINING} a=1", "the script ends before, by 'exit 1'"),
        *(
            (TRAINING.replace("verl.trainer.main_ppo", module) + " a=1", f"{module} .*max_lag=1")
            for module in (
                "verl.experimental.one_step_off_policy.main_ppo",
                "recipe.one_step_off_policy.async_main_ppo",
                "verl.experimental.fully_async_policy.fully_async_main",
            )
        ),
        (f"A='open\n{TRAINING} a=1", "line 1 of the script: ' is never closed"),
        (f"f() {{ f; }}\nf\n{TRAINING.replace('verl', 'other')}", "no training command"),
        ("x" * 2_000_001, "2000001 characters"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused(script, message):
    with pytest.raises(ConfigError, match=message):
        read_script(script, {})


def test_nothing_of_a_script_is_executed(tmp_path):
    marker = tmp_path / "ran"
    script = f"X=$(touch {marker})\ntouch {marker}\n{TRAINING} a=$X b=`touch {marker}` c=$((0))"
    read_script(script, {})
    assert not marker.exists()


DRAWN = {
    name: key
    for name, key in all_keys().items()
    if key.rule.status == "supported"
    and name not in ALIASES
    and type(key.default) in (int, float, bool)
    and key.rule.high is None
    and key.rule.excluded is None
    and not name.startswith(("trainer.n", "ray_init", "dag."))
    and not name.endswith(("sequence_parallel", "clip_ratio_low"))
}


@pytest.mark.parametrize("seed", range(4))
def test_the_command_for_a_random_script_of_siirl_has_its_configuration(seed, tmp_path):
    draw = random.Random(seed)
    drawn = draw.sample(sorted(DRAWN), 12)
    settings = [
        (
            name,
            str(DRAWN[name].default + draw.choice((0, 1)))
            if type(DRAWN[name].default) is int
            else str(not DRAWN[name].default)
            if type(DRAWN[name].default) is bool
            else str(DRAWN[name].default + 0.25),
        )
        for name in drawn
    ]
    settings.append(("trainer.experiment_name", draw.choice(("it's", "a b", 'x"y', "d$e"))))
    script = random_script(draw, settings).replace("verl.trainer.main_ppo", "siirl.main_dag")
    (tmp_path / "run.sh").write_text(script)
    command = [sys.executable, "-m", "siirl.cli", "migrate", str(tmp_path / "run.sh")]
    page = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False).stdout
    fake = 'siirl() { shift; printf "%s\\0" "$@"; }\n'
    run = subprocess.run(["bash", "-c", fake + page], capture_output=True, text=True, timeout=20, check=True)
    words = run.stdout.split("\0")[:-1]
    given = load_config([f"{name}={value}" for name, value in settings if "$" not in value])
    added = {
        "data.train_batch_size",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "trainer.balance_batch",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "critic.optim.lr",
        "trainer.n_gpus_per_node",
    }
    result = load_config([word for word in words if "$" not in word])
    assert set(result.explicit) - set(given.explicit) <= added | {
        name for name in all_keys() if name.endswith(("use_dynamic_bsz", "max_token_len_per_gpu"))
    }
    assert all(f"{name}={value}" in words for name, value in settings), page


def test_a_variable_of_the_shell_that_the_script_would_take_is_named_without_its_value(tmp_path, monkeypatch):
    script = tmp_path / "run.sh"
    script.write_text(
        "N=${PET_NNODES:-1}; K=${WANDB_KEY-none}; S=${SEED:-3}; SEED=${SEED:-4}\n"
        "python3 -m verl.trainer.main_ppo trainer.nnodes=$N trainer.seed=$S\n"
    )
    for name, value in {"PET_NNODES": "8", "WANDB_KEY": "secret", "ELSE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SEED", raising=False)
    source = read_source(script, {}, ())
    told = " ".join(f"{text} in {names}" for text, names in source.open.items())
    assert "trainer.nnodes=1" in source.arguments and "secret" not in told
    assert "siirl migrate run.sh PET_NNODES=$PET_NNODES" in told and "WANDB_KEY=$WANDB_KEY" in told
    assert "SEED" not in told and "ELSE" not in told
    given = read_source(script, {"PET_NNODES": "8"}, ())
    assert "trainer.nnodes=8" in given.arguments and "PET_NNODES" not in str(given.open)
