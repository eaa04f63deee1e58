"""The rules, in the order in which a search asks them."""

from jax_fastops.autofuse._dropout import DropoutRule
from jax_fastops.autofuse._heads import HeadsRule
from jax_fastops.autofuse._linear import LinearLossRule
from jax_fastops.autofuse._pattern_rule import PatternRule
from jax_fastops.autofuse._rule import Rule
from jax_fastops.autofuse._windows import WindowRule

RULES: list[type[Rule]] = [DropoutRule, WindowRule, HeadsRule, LinearLossRule, PatternRule]
