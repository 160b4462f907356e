"""Plain torch networks of many kinds, each with inputs: what ``convert`` is tested on.

>>> row = next(row for row in ARCHITECTURES if row.name == "unet")
>>> row.run(row.build(), row.inputs(2, seed=0)).shape
torch.Size([2, 2, 12, 12])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tests import architectures_images as images
from tests import architectures_sequence as sequences

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


class Architecture(NamedTuple):
    """A network and inputs for it.

    Attributes:
        name: what tests are called by.
        make: gives the network, with weights at the random start of its layers.
        sample: ``sample(n)`` gives n inputs, at random.
        batch_dim: the dimension of the inputs that counts samples; of outputs it is the first.
    """

    name: str
    make: Callable[[], nn.Module]
    sample: Callable[[int], Inputs]
    batch_dim: int = 0

    def build(self, seed: int = 0) -> nn.Module:
        """The network in evaluation mode, the same for the same seed.

        Weights are larger than torch's, so that signals do not vanish. Scales, shifts and (of batch
        norms) statistics of norms are not the 1 and 0 that they start with.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            net = self.make()
            for module in net.modules():
                if isinstance(module, NORMS):
                    nn.init.uniform_(module.weight, 0.5, 1.5)
                    if not isinstance(module, nn.RMSNorm):
                        nn.init.normal_(module.bias, std=0.3)
                elif isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=(1.5 / module.in_features) ** 0.5)
                elif isinstance(module, nn.modules.conv._ConvNd):
                    terms = math.prod(module.kernel_size) * module.in_channels / module.groups
                    if module.transposed:  # each output sees one in stride^d of the kernel
                        terms /= math.prod(module.stride)
                    nn.init.normal_(module.weight, std=(2 / terms) ** 0.5)
            if any(isinstance(module, BATCH_NORMS) for module in net.modules()):
                net.train()
                for _ in range(20):
                    self.run(net, self.sample(64))
        return net.eval()

    def inputs(self, n: int, seed: int) -> Inputs:
        """A batch of n: a tensor, or a tuple or dict of tensors, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.sample(n)

    def run(self, net: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the network: a tuple is several arguments, a tensor or a dict is one."""
        return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


def normal(*shape: int) -> Callable[[int], Tensor]:
    """Standard normal numbers (n, *shape)."""
    return lambda n: torch.randn(n, *shape)


def pictures(*shape: int) -> Callable[[int], Tensor]:
    """Noise of standard deviation 1 on grounds (n, C, 1, 1) of average 0.5, of random colours."""
    ground = (shape[0], *[1] * (len(shape) - 1))
    return lambda n: 0.5 + 0.7 * torch.randn(n, *ground) + torch.randn(n, *shape)


def time_first(n: int) -> Tensor:
    return torch.randn(8, n, 16)


def tokens(n: int) -> Tensor:
    """Sentences of 6 to 10 words (n, 10), filled up with 0."""
    words = torch.randint(1, 30, (n, 10))
    lengths = torch.randint(6, 11, (n, 1))
    return words * (torch.arange(10) < lengths)


def queries_and_memory(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, 12), torch.randn(n, 8, 10)


def image_and_table(n: int) -> dict[str, Tensor]:
    return {"image": pictures(1, 12, 12)(n), "table": torch.randn(n, 6)}


ARCHITECTURES = (
    # images
    Architecture("resnet18", lambda: images.resnet18(width=8), pictures(3, 16, 16)),
    Architecture("densenet", images.DenseNet, pictures(1, 12, 12)),
    Architecture("mobilenet", images.MobileNet, pictures(3, 16, 16)),
    Architecture("shufflenet", images.ShuffleNet, pictures(3, 16, 16)),
    Architecture("unet", images.UNet, pictures(1, 12, 12)),
    Architecture("unet_interpolate", images.UNetInterpolate, pictures(1, 12, 12)),
    Architecture("convnext", images.ConvNeXt, pictures(3, 12, 12)),
    Architecture("mixer", images.MLPMixer, pictures(3, 16, 16)),
    Architecture("vit", images.VisionTransformer, pictures(1, 12, 12)),
    Architecture(
        "vit_fused",
        lambda: images.VisionTransformer(images.FusedAttention, 3, 16),
        pictures(3, 16, 16),
    ),
    Architecture("swin", images.WindowAttention, pictures(3, 16, 16)),
    Architecture("max_pool", images.MaxPoolCNN, pictures(1, 12, 12)),
    Architecture("group_norm", images.GroupNormNet, pictures(3, 12, 12)),
    Architecture("autoencoder", images.Autoencoder, pictures(1, 12, 12)),
    Architecture("conv3d", images.Conv3dNet, pictures(1, 6, 8, 8)),
    Architecture("shared_block", images.SharedBlock, pictures(1, 12, 12)),
    # sequences and sets
    Architecture("temporal_conv", sequences.TemporalConvNet, normal(3, 12)),
    Architecture("wavenet", sequences.WaveNet, normal(1, 12)),
    Architecture("time_distributed", sequences.TimeDistributed, normal(8, 10)),
    Architecture("encoder", sequences.Encoder, normal(8, 16)),
    Architecture(
        "encoder_time_first",
        lambda: sequences.Encoder(batch_first=False, activation="gelu", norm_first=True),
        time_first,
        batch_dim=1,
    ),
    Architecture("causal_decoder", sequences.CausalDecoder, normal(8, 16)),
    Architecture("text", sequences.TextClassifier, tokens),
    Architecture("graph", sequences.GraphNet, normal(9, 6)),
    # rows, several inputs, several outputs
    Architecture("nested_mlp", sequences.nested_mlp, normal(16)),
    Architecture("mixed_activations", sequences.MixedActivations, normal(16)),
    Architecture("branching", sequences.Branching, normal(20)),
    Architecture("in_place", sequences.InPlace, normal(16)),
    Architecture("gated_mlp", sequences.GatedMLP, normal(16)),
    Architecture("two_inputs", sequences.CrossAttention, queries_and_memory),
    Architecture("dict_input", sequences.ImageAndTable, image_and_table),
    Architecture("dict_output", sequences.MultiTask, normal(16)),
    Architecture("tuple_output", sequences.MeanAndScale, normal(12)),
)
