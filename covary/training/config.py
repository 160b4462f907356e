"""How a network is trained: the numbers, and the learning rate they give at each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
SCHEDULES = ("constant", "cooldown", "cosine", "one-cycle")
# The last part of the steps, in which a cooldown takes the learning rate down.
_COOLDOWN = 0.1


def option(help_text: str, panel: str = "Training", **more: Any) -> Mapping[str, Any]:
    """Metadata of a field that is an option of the command line: its explanation and heading.

    ``more`` may have ``flag``, how the option is called if not as the field, ``min``,
    ``show_default`` and ``commas`` (names have commas between them).
    """
    return {"help": help_text, "panel": panel, **more}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train. The defaults are those of the paper's MNIST networks but for the epochs.

    Weight decay is an L2 penalty with ``adam``, decoupled with ``adamw``. Of the schedules,
    ``"cooldown"`` is constant and goes down to 0 in the last 10% of the steps, ``"cosine"`` goes
    down to 0, and ``"one-cycle"`` goes up for 30% of the steps, then down to 0. The seed decides
    the order of the samples.
    """

    epochs: int = field(default=20, metadata=option("Passes over the training data."))
    batch_size: int = field(default=128, metadata=option("Samples in a step, over all devices."))
    lr: float = field(default=5e-4, metadata=option("Learning rate, at its highest."))
    weight_decay: float = field(default=1e-4, metadata=option("Weight decay."))
    optimizer: str = field(default="adam", metadata=option(f"{' or '.join(OPTIMIZERS)}."))
    schedule: str = field(
        default="constant",
        metadata=option(f"{', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}."),
    )
    clip: float = field(default=0.0, metadata=option("Largest norm of the gradient; 0 for any."))
    compile: bool = field(
        default=False,
        metadata=option(
            "Compile the network first (torch.compile), for a minute or so: it trains faster "
            "then, but for full covariances, which train slower."
        ),
    )
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Training needs {name} >= {least} (a whole number), got {value}.")
        for name in ("lr", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Training needs a finite {name} >= 0, got {value}.")
        for name, known in (("optimizer", tuple(OPTIMIZERS)), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"Unknown {name} {getattr(self, name)!r}; known are {', '.join(known)}."
                )


def make_optimizer(config: TrainingConfig, module: nn.Module) -> torch.optim.Optimizer:
    """Adam or AdamW over the module's parameters, fused into one kernel where there is one.

    Where the module has ``decays``, factors (R,) of its replicas, each has its own decoupled weight
    decay: so many times that of the configuration.
    """
    parameters = list(module.parameters())
    decays: Tensor | None = getattr(module, "decays", None)
    common = config.weight_decay if decays is None else 0.0
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": common}
    if all(parameter.device.type in ("cpu", "cuda") for parameter in parameters):
        settings["fused"] = True
    optimizer = OPTIMIZERS[config.optimizer](parameters, **settings)
    if decays is not None:
        rates = config.weight_decay * decays

        @torch.no_grad()
        def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            kept = 1 - optimizer.param_groups[0]["lr"] * rates
            for parameter in parameters:
                parameter.mul_(kept.to(parameter).view(-1, *[1] * (parameter.dim() - 1)))

        optimizer.register_step_pre_hook(decay)
    return optimizer


def learning_rate(config: TrainingConfig, step: int, steps: int) -> float:
    """The learning rate of step 0, 1, ... of so many. A function of these numbers alone.

    So there is no state of a schedule to save, and a resumed run cannot get it wrong.
    """
    done = step / max(1, steps)
    if config.schedule == "cooldown":
        return config.lr * min(1.0, (1 - done) / _COOLDOWN)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "one-cycle":
        if done < 0.3:
            low = config.lr / 25
            return low + (config.lr - low) * 0.5 * (1 - math.cos(math.pi * done / 0.3))
        return config.lr * 0.5 * (1 + math.cos(math.pi * (done - 0.3) / 0.7))
    return config.lr
