"""The two-stage parser against the library's own, in a process of its own: it stays once installed."""

import itertools
import json
import subprocess
import sys
import textwrap

import pytest

from siirl.rewards import math_answer

pytestmark = pytest.mark.heavy

FORMULAS = [
    r"42", r"-3.75", r"1,234", r"50\%", r"\frac{3}{4}", r"\dfrac34", r"-\frac{a}{b}", r"2\sqrt{2}",
    r"\sqrt[3]{x}", r"(1, 2)", r"\left[1,\infty\right)", r"(-\infty, 2] \cup [3, 5)",
    r"\{1, 2, 3\}", r"x^2+2x+1", r"(x+1)(x-1)", r"x=5", r"x \in [0,1]", r"1 < x \le 3", r"\pi r^2",
    r"\frac{3\pi}{2}", r"e^{i\pi}", r"\log_2 8", r"\sin(x)+\cos x",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\binom{5}{2}", r"5!", r"\text{Evelyn}",
    r"\text{(B)}", r"3\text{ cm}", r"10^{\circ}", r"a, b, c", r"|x-1|", r"\lfloor x \rfloor",
    r"3:4", r"2^{10}", r"0.\overline{3}", r"\frac{1}{", r"", r"x+", r"\int_0^1 x dx",
    r"\sum_{n=1}^{3} n", r"y = 2x + 1", r"1\frac{1}{2}", r"$5$", r"A \cup B", r"7 \pm 2",
]  # fmt: skip

CODE = """
    import json, sys
    from math_verify import parse
    from math_verify.parser import parse_latex_cached

    def parsed(formulas):
        parse_latex_cached.cache_clear()
        found = [parse(f"\\\\boxed{{{text}}}") for text in formulas]
        return [repr([(type(value).__name__, str(value)) for value in values]) for values in found]

    formulas = json.load(sys.stdin)
    before = parsed(formulas)
    from siirl.rewards import latex_parser
    latex_parser.install()
    from latex2sympy2_extended import latex2sympy2
    assert latex2sympy2._Latex2Sympy().create_parser("1").__class__ is latex_parser.TwoStageParser
    print(json.dumps([before, parsed(formulas)]))
"""


def test_the_two_stage_parser_gives_what_the_library_gives():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE)],
        input=json.dumps(FORMULAS),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    differences = [(f, b, a) for f, b, a in zip(FORMULAS, before, after, strict=True) if a != b]
    assert not differences
    assert sum(parsed != "[]" for parsed in after) > 35


VALUES = [
    "1", "0.5", r"\frac12", "50", r"50\%", r"2\sqrt{8}", r"4\sqrt{2}", "1.5", r"-\frac{3}{2}",
    "x^2-1", "(x-1)(x+1)", r"\frac{1}{3}", "0.333", "0.33333333", "1024", "2^{10}", r"\sqrt{x^2}",
    "x", "y", "x=5", "5", "2+i", "(1, 2)",
]  # fmt: skip


def test_what_is_settled_without_math_verify_agrees_with_it():
    _, verify = math_answer._library()
    parsed = {text: math_answer._parse_truth(text) for text in VALUES}
    settled = 0
    for truth, answer in itertools.product(VALUES, VALUES):
        verdict = math_answer._compare_text(answer, truth)
        if verdict is None and math_answer._clearly_differ(parsed[truth], parsed[answer]):
            verdict = False
        if verdict is not None:
            settled += 1
            assert verify(parsed[truth], parsed[answer]) == verdict, (truth, answer)
    assert settled > len(VALUES) ** 2 / 2
