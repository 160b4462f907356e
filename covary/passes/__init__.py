"""Passes of varying values through a model: one of moments, one of draws.

Both run the model itself on ``Varying`` values. A pass of moments follows ``covary.rules``. A pass
of draws knows next to nothing of them: it applies every torch function to the draws, and draws
sources where they enter. It is what moments are measured with and compared to.
"""

from covary.passes.base import Call, Pass, WeightUse, has_errors
from covary.passes.draw_pass import DrawPass
from covary.passes.moment_pass import MomentPass

__all__ = ["Call", "DrawPass", "MomentPass", "Pass", "WeightUse", "has_errors"]
