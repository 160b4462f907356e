"""Inputs made to be misclassified: a little away from real ones, in the maximum norm.

``fgsm`` and ``pgd`` follow the gradient of the loss; ``square`` asks for outputs alone. A transfer
attack gives what was made on one network to another: ``other(fgsm(net, x, y, epsilon))``.

Examples:
    >>> import torch, covary
    >>> from covary import attacks
    >>> _ = torch.manual_seed(0)
    >>> net = covary.mlp([4, 16, 3], activation="heaviside")
    >>> x, y = torch.rand(8, 4), torch.randint(3, (8,))
    >>> attacked = attacks.fgsm(net, x, y, 0.1, bounds=(0, 1))
    >>> bool((attacked - x).abs().max() <= 0.1 + 1e-6)
    True
    >>> defended = covary.with_noise(net, [0.0, 0.0])
    >>> torch.equal(attacks.fgsm(defended, x, y, 0.1), x)  # a step has no slope to follow
    True
"""

from covary.attacks.common import Bounds, Network
from covary.attacks.methods import fgsm, input_gradient, pgd, signed_step, square

__all__ = ["Bounds", "Network", "fgsm", "input_gradient", "pgd", "signed_step", "square"]
