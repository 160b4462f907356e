"""How unsure is a network, and how far is that to be trusted."""

from covary.uncertainty import metrics, scores

__all__ = ["metrics", "scores"]
