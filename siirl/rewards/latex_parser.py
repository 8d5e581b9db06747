"""Makes math-verify's LaTeX parser several times faster, with the same results. For reward workers.

latex2sympy2_extended parses by ANTLR with full LL prediction, which is slow in Python (10 to 20 ms a
formula). ANTLR's SLL prediction gives the same tree or a syntax error (antlr4.atn.PredictionMode.SLL says
so), so that it can be tried first and LL used only after an error. To be dropped when the library does so
itself (seen in 1.11).
"""

from antlr4 import PredictionMode
from antlr4.error.Errors import ParseCancellationException
from antlr4.error.ErrorStrategy import BailErrorStrategy, DefaultErrorStrategy
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.antlr_parser import PSParser


class TwoStageParser(PSParser):
    """The library's parser, whose start rule tries SLL first."""

    def math(self):
        """Parse the whole input; errors are reported as the library's parser reports them."""
        listeners, self._listeners = self._listeners, []
        self._errHandler = BailErrorStrategy()
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except ParseCancellationException:
            self.reset()
        finally:
            self._listeners = listeners
        self._errHandler = DefaultErrorStrategy()
        self._interp.predictionMode = PredictionMode.LL
        return super().math()


def install() -> None:
    """Have latex2sympy2_extended, and with it math-verify, use TwoStageParser in this process."""
    latex2sympy2.PSParser = TwoStageParser
