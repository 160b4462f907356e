"""Networks for sequences, rows and several inputs, in plain torch, in people's many spellings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


def nested_mlp():
    """(B, 16) to (B, 5): Sequentials within Sequentials."""

    def layer(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())

    hidden = nn.Sequential(layer(24, 24), nn.Sequential(layer(24, 16)), nn.Dropout(0.1))
    return nn.Sequential(nn.Sequential(layer(16, 24), hidden), nn.Linear(16, 5))


class MixedActivations(nn.Module):
    def __init__(self, dim=16, outputs=4):
        super().__init__()
        activations = [nn.PReLU(16), nn.ELU(), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Tanh()]
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in activations)
        self.norm = nn.BatchNorm1d(dim)
        self.activations = nn.ModuleList(activations)
        self.out = nn.Linear(dim, outputs)

    def forward(self, x):
        x = self.norm(x)
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = activation(layer(x))
        x = F.selu(x) + F.celu(x, alpha=0.5) - torch.exp(-x.abs()) + F.logsigmoid(x)
        return self.out(x)


class Branching(nn.Module):
    """Depth by a loop, layers by conditions, a long skip every second layer."""

    def __init__(self, dim=20, depth=5, outputs=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.out = nn.Linear(dim, outputs)

    def forward(self, x, *, scale=None):
        skip = None
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i % 2 == 0:
                x = torch.relu(x)
                skip = x if skip is None else skip + x
            else:
                x = torch.sigmoid(x) * 2
        if skip is not None and x.shape == skip.shape:
            x = x + skip
        if scale is not None:
            x = x * scale
        return self.out(x)


class InPlace(nn.Module):
    """Statements that change a tensor which has other names: the shortcut sees the change too."""

    def __init__(self, dim=16, outputs=4):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.relu = nn.ReLU(inplace=True)
        self.out = nn.Linear(dim, outputs)

    def forward(self, x):
        x = self.fc1(x)
        shortcut = x
        out = self.fc2(self.relu(x))  # from here on, shortcut is relu(x)
        out.tanh_()
        out += shortcut
        gate = self.fc3(out)
        gate.sigmoid_().mul_(2)
        out *= gate
        return self.out(out)


class GatedMLP(nn.Module):
    def __init__(self, dim=16, hidden=24, outputs=4):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)
        self.glu = nn.Linear(dim, 2 * dim)
        self.swish, self.value = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x):
        x1, x2 = self.up(self.norm(x)).chunk(2, dim=-1)
        x = x + self.down(x1 * torch.sigmoid(x2))
        x = x + F.glu(self.glu(x), dim=-1)
        return self.out(F.silu(self.swish(x)) * self.value(x))


class TemporalConvNet(nn.Module):
    """(B, 3, 12) to (B, 4): causal convolutions, each with twice the dilation of the one before."""

    def __init__(self, channels=12, outputs=4):
        super().__init__()
        self.enter = nn.Conv1d(3, channels, 1)
        self.convs = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, dilation=2**i) for i in range(3)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels) for _ in range(3))
        self.out = nn.Linear(channels, outputs)

    def forward(self, x):
        x = self.enter(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            out = F.relu(norm(conv(F.pad(x, (2 * conv.dilation[0], 0)))), inplace=True)
            x = x + out
        return self.out(x[:, :, -1])


class WaveNet(nn.Module):
    """(B, 1, 12) to (B, 2, 12): gates tanh * sigmoid, and the sum of what each layer puts aside."""

    def __init__(self, channels=10):
        super().__init__()
        self.enter = nn.Conv1d(1, channels, 2)
        self.gates = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=d) for d in (1, 2))
        self.residuals = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(2))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, 2, 1))

    def forward(self, x):
        x = self.enter(F.pad(x, (1, 0)))
        skips = 0
        for gate, residual, skip in zip(self.gates, self.residuals, self.skips, strict=True):
            filtered, gating = torch.chunk(gate(F.pad(x, (gate.dilation[0], 0))), 2, dim=1)
            out = torch.tanh(filtered) * torch.sigmoid(gating)
            skips = skips + skip(out)
            x = x + residual(out)
        return self.out(skips)


class TimeDistributed(nn.Module):
    """(B, T, 10) to (B, 4): an MLP for each time, with times merged into the batch."""

    def __init__(self, dim=10, hidden=20, outputs=4):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, outputs)
        self.norm = nn.BatchNorm1d(hidden)

    def forward(self, x):
        batch, time, dim = x.shape
        x = x.reshape(batch * time, dim)
        x = self.fc2(F.relu(self.norm(self.fc1(x))))
        x = x.view(batch, time, -1)
        return x[:, 1:].mean(1) + 0.5 * x[:, 0]


class Encoder(nn.Module):
    """(B, T, d) to (B, 4), or from (T, B, d) where ``batch_first`` is False."""

    def __init__(self, dim=16, batch_first=True, activation="relu", norm_first=False):
        super().__init__()
        self.time = 1 if batch_first else 0
        layer = nn.TransformerEncoderLayer(
            dim, 2, 32, activation=activation, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        return self.head(self.encoder(x).mean(dim=self.time))


class CausalDecoder(nn.Module):
    """(B, T, d) to (B, T, 6): rotary positions, causal attention, RMSNorm, SwiGLU."""

    def __init__(self, dim=16, heads=2, length=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2, self.w3 = nn.Linear(dim, 32), nn.Linear(32, dim), nn.Linear(dim, 32)
        self.out = nn.Linear(dim, 6)
        half = dim // heads // 2
        angle = torch.outer(torch.arange(length), 10.0 ** -torch.linspace(0, 2, half))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def rotate(self, x):
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (even * self.cos - odd * self.sin, even * self.sin + odd * self.cos)
        return torch.stack(turned, dim=-1).flatten(-2)

    def forward(self, x):
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (
            w(h).view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        h = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.wo(h.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        x = x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return self.out(x)


class TextClassifier(nn.Module):
    """Tokens (B, T), 0 where there is none, to (B, 4): attention decides what is averaged."""

    def __init__(self, words=30, dim=16, length=10):
        super().__init__()
        self.embedding = nn.Embedding(words, dim, padding_idx=0)
        self.position = nn.Embedding(length, dim)
        self.score = nn.Linear(dim, 1)
        self.fc = nn.Linear(dim, 24)
        self.out = nn.Linear(24, 4)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        score = self.score(torch.tanh(x)).squeeze(-1)
        weight = F.softmax(score.masked_fill(tokens == 0, float("-inf")), dim=1)
        x = torch.bmm(weight.unsqueeze(1), x).squeeze(1)
        return self.out(F.relu(self.fc(x)))


class GraphNet(nn.Module):
    """Features (B, 9, 6) of nine nodes on a ring to one number per node (B, 9)."""

    def __init__(self, nodes=9, features=6, hidden=16):
        super().__init__()
        eye = torch.eye(nodes)
        adjacency = (eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 3
        self.register_buffer("adjacency", adjacency)
        self.fc1, self.fc2 = nn.Linear(features, hidden), nn.Linear(hidden, hidden)
        self.bilinear = nn.Parameter(torch.randn(hidden, hidden) / hidden)
        self.out = nn.Linear(2 * hidden, 1)

    def forward(self, x):
        x = F.relu(self.fc1(torch.einsum("ij,bjf->bif", self.adjacency, x)))
        x = F.relu(self.fc2(torch.matmul(self.adjacency, x)))
        weight = torch.einsum("bif,fg,bjg->bij", x, self.bilinear, x) / math.sqrt(x.shape[-1])
        context = torch.softmax(weight, -1) @ x
        return self.out(torch.cat([x, context], dim=-1))[..., 0]


class CrossAttention(nn.Module):
    """Two inputs: queries (B, 4, 12) and memory (B, 8, 10) to (B, 4, 5)."""

    def __init__(self, dim=16):
        super().__init__()
        self.query, self.memory = nn.Linear(12, dim), nn.Linear(10, dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 5)

    def forward(self, queries, memory):
        q, kv = self.query(queries), self.memory(memory)
        attended, _ = self.attention(q, kv, kv, need_weights=False)
        return self.out(F.gelu(self.norm(q + attended), approximate="tanh"))


class ImageAndTable(nn.Module):
    """A dict {"image": (B, 1, 12, 12), "table": (B, 6)} to (B, 3): a gate, and a cat."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2)
        self.table = nn.Linear(6, 8)
        self.gate = nn.Linear(8, 8)
        self.out = nn.Linear(16, 3)

    def forward(self, batch):
        image = F.relu(self.conv(batch["image"])).mean((2, 3))
        table = F.relu(self.table(batch["table"]))
        image = image * torch.sigmoid(self.gate(table))
        return self.out(torch.cat((image, table), dim=1))


class MultiTask(nn.Module):
    """(B, 16) to a dict of class scores (B, 5), their probabilities, and a number (B,)."""

    def __init__(self, dim=16, hidden=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.classes, self.value = nn.Linear(hidden, 5), nn.Linear(hidden, 1)

    def forward(self, x):
        features = F.relu(self.trunk(x))
        logits = self.classes(features)
        value = self.value(features).squeeze(-1)
        return {"logits": logits, "probabilities": logits.softmax(-1), "value": value}


class MeanAndScale(nn.Module):
    """(B, 12) to a tuple: the mean (B, 4) and a positive scale (B, 4)."""

    def __init__(self, dim=12, hidden=20):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, 8)

    def forward(self, x):
        mean, scale = self.fc2(torch.tanh(self.fc1(x))).split(4, dim=1)
        return mean, F.softplus(scale) + 1e-3
