"""Tools that come with siirl: a calculator, and Python in a sandbox."""

import ast
import math
import operator
import os
from collections.abc import Callable
from typing import Any

from siirl.agents.tool_schema import function_schema
from siirl.errors import EpisodeFailed
from siirl.sandbox.box import Boxes, Job
from siirl.sandbox.limits import MIB, Limits, Result

Number = int | float

MAX_EXPRESSION = 1000  # characters
MAX_BITS = 4096  # of a whole number

BINARY: dict[type, Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type, Callable[[Any], Number]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "floor", "ceil", "gcd")},
    **{name: getattr(math, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
}
NAMES: dict[str, Number] = {"pi": math.pi, "e": math.e}


class Calculator:
    """Arithmetic: + - * / // % **, parentheses, and a few functions of numbers; no code is evaluated."""

    max_concurrent = 0

    def __init__(self) -> None:
        self.schema = function_schema(
            "calculator",
            "Evaluate an arithmetic expression, for example (2 + 3) * 4 ** 2 or sqrt(2).",
            {"expression": {"type": "string", "description": "The expression."}},
            ["expression"],
        )

    def __call__(self, arguments: dict[str, Any], episode: Any) -> str:
        """The value, or what is wrong with the expression."""
        try:
            return number_text(calculate(arguments["expression"]))
        except CalculationError as error:
            return f"Error: {error}."


class CalculationError(ValueError):
    """An expression that is not arithmetic, or has no value."""


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression. CalculationError says in words what is wrong with it."""
    if len(expression) > MAX_EXPRESSION:
        raise CalculationError(f"the expression has more than {MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalculationError(f"{expression[:60]!r} is not an arithmetic expression") from error
    try:
        return _value(tree.body)
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except (OverflowError, RecursionError):
        raise CalculationError("the number is too large") from None
    except (ValueError, TypeError) as error:
        raise CalculationError(str(error)) from None


def number_text(value: Number) -> str:
    """A number as a reader writes it: 6 rather than 6.0, 12 significant digits."""
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            result = value
        case ast.Name(id=name) if name in NAMES:
            result = NAMES[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            result = UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            result = _binary(op, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            result = FUNCTIONS[name](*map(_value, args))
        case _:
            known = ", ".join((*FUNCTIONS, *NAMES))
            raise CalculationError(f"{ast.unparse(node)[:60]!r} is not arithmetic (known names: {known})")
    if isinstance(result, complex) or not math.isfinite(_as_float(result)):
        raise CalculationError("the result is not a real number")
    return result


def _binary(op: ast.operator, left: Number, right: Number) -> Number:
    """One operation, with whole numbers of bounded length: 9**9**9 would take hours."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if isinstance(op, ast.Mult) else 0
        if isinstance(op, ast.Pow) and abs(left) > 1:
            bits = right * left.bit_length()
        if bits > MAX_BITS:
            raise OverflowError
    return BINARY[type(op)](left, right)


def _as_float(value: Number) -> float:
    return 0.0 if isinstance(value, int) else value


class PythonTool:
    """Runs a program in the sandbox (docs/security.md) and gives what it prints; each call starts anew.

    time_s, memory_mb: limits of one program. max_concurrent: programs at once on this rank; 0: as many as
    there are cores. There are no more sandboxes than that, each kept for the next program.
    """

    def __init__(self, time_s: float = 5.0, memory_mb: int = 512, max_concurrent: int = 0):
        self.schema = function_schema(
            "python",
            "Run a Python program and get what it prints. Each call starts anew.",
            {"code": {"type": "string", "description": "The program. Print what you want to see."}},
            ["code"],
        )
        self.max_concurrent = max_concurrent or os.cpu_count() or 1
        self._limits = Limits(time_s=time_s, memory_bytes=memory_mb * MIB)
        self._boxes = Boxes(self.max_concurrent)

    def __call__(self, arguments: dict[str, Any], episode: Any) -> str:
        """What the program prints, and how it failed.

        EpisodeFailed if this machine did not give it its time; SandboxError if the sandbox does not work.
        """
        return _report(self._boxes.submit(Job(arguments["code"]), self._limits).result(), self._limits)

    def close(self) -> None:
        """End its sandboxes, as the end of the process does."""
        self._boxes.close()


def _report(result: Result, limits: Limits) -> str:
    if result.status == "starved":
        raise EpisodeFailed(
            f"python: a program has run for {result.cpu_s:.1f} s in {result.time_s:.0f} s on this busy "
            f"machine: it may have {limits.time_s:g} s",
            "tool",
        )
    if result.status == "timeout":
        return f"{result.stdout}Error: no end within {limits.time_s:g} s."
    if result.status == "output":
        return f"{result.stdout}Error: too much output."
    if result.status == "failed":
        lines = result.stderr.strip().splitlines()
        return f"{result.stdout}Error: {lines[-1] if lines else f'exit code {result.exit}'}"
    return result.stdout or "(nothing was printed)"


BUILTIN_TOOLS: dict[str, Callable[..., Any]] = {"calculator": Calculator, "python": PythonTool}
"""Name in a tool file -> class, called with the file's `config`."""
