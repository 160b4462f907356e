"""A Gaussian posterior of the weights of a trained network: ``covary.posterior.fit``.

Laplace's approximation: around the trained weights, the precision of the posterior is the
generalised Gauss-Newton matrix of the training data plus the precision of the prior. Of each layer
it is taken as diagonal in the basis of its Kronecker factors (the second moments of what goes into
the layer, and of gradients that come back to it), with the curvature along each axis of that basis
measured from gradients (docs/theory.md, eqs. 44-47).
"""

from covary.posterior.fitting import fit

__all__ = ["fit"]
