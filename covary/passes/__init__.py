"""Passes of varying values through a model: one of moments, one of draws."""

from covary.passes.base import Call, Pass
from covary.passes.draw_pass import DrawPass
from covary.passes.moment_pass import MomentPass

__all__ = ["Call", "DrawPass", "MomentPass", "Pass"]
