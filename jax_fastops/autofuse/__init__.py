"""``autofuse``: a traced program with calls of our ops in place of what they compute.

Users call :func:`jax_fastops.autofuse`. Authors of rules import the other names from this package:
a :class:`Rule` recognizes a computation at a :class:`Value` of a program, and returns the
:class:`Rewrite` that replaces it. Patterns of element-wise operations and reductions need no rule:
a :class:`Pattern` is a function in plain JAX.
"""

from jax_fastops.autofuse._api import autofuse
from jax_fastops.autofuse._evaluate import RULES
from jax_fastops.autofuse._pattern import PATTERNS, Pattern
from jax_fastops.autofuse._report import FuseReport, Missed, Replaced
from jax_fastops.autofuse._rule import Call, Read, Rewrite, Rule, Search
from jax_fastops.autofuse._value import Node, Value

__all__ = [
    "PATTERNS",
    "RULES",
    "Call",
    "FuseReport",
    "Missed",
    "Node",
    "Pattern",
    "Read",
    "Replaced",
    "Rewrite",
    "Rule",
    "Search",
    "Value",
    "autofuse",
]
