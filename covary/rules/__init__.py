"""What each torch function makes of values that vary: one short rule each, by family.

``RULES`` is the registry. To add a rule, decorate a function with ``rule``, ``elementwise`` or
``composed`` (docs/own-rule.md).
"""

# The modules are imported for the rules that they register.
from covary.linalg import summed_to
from covary.rules import (  # noqa: F401
    along,
    attention,
    convolution,
    linear,
    moving,
    nonlinear,
    unvarying,
)
from covary.rules.helpers import differentiated, estimated, mapped, merged
from covary.rules.registry import (
    BATCH,
    CHOICE,
    EXACT,
    LINEARISED,
    MATCHED,
    PRODUCT,
    RULES,
    Rule,
    about_the_mean,
    composed,
    elementwise,
    rule,
)

__all__ = [
    "BATCH", "CHOICE", "EXACT", "LINEARISED", "MATCHED", "PRODUCT", "RULES", "Rule",
    "about_the_mean", "composed", "differentiated", "elementwise", "estimated", "mapped", "merged",
    "rule", "summed_to",
]  # fmt: skip
