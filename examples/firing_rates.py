"""For a computational neuroscientist: rates and Fano factors of spiking neurons without simulation.

python -m examples.firing_rates
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt
from torch import nn

import covary
from covary.stochastic import simulate_spikes
from examples.drawing import BLUE, GREEN, ORANGE, options, save


def one_neuron(noise: float) -> nn.Sequential:
    """(B, 1) mean currents in mV/ms into one neuron, with white noise in mV per root ms."""
    weight, read = covary.nn.Linear(1, 1, bias=False), covary.nn.Linear(1, 1, bias=False)
    for layer in (weight, read):
        nn.init.ones_(layer.weight)
    neuron = covary.nn.Activation(covary.activations.get("lif"))
    return nn.Sequential(covary.nn.Lift(0.0), weight, covary.nn.Noise(noise), neuron, read).eval()


def main() -> None:
    arguments = options(__doc__)
    currents = torch.linspace(-1, 4, 201)
    few = torch.linspace(-0.5, 4, 4 if arguments.quick else 10)[:, None]

    figure, (rates, fano) = plt.subplots(1, 2, figsize=(9, 3.8))
    for noise, color in ((0.5, BLUE), (2.0, ORANGE), (4.5, GREEN)):
        # Analytic: mean, variance and gain of the spike count per ms (docs/theory.md).
        exact = covary.activations.get("lif")(currents, torch.full_like(currents, noise**2))
        rates.plot(currents, 1000 * exact.mean, color=color, label=f"noise {noise:g}")
        visible = exact.mean > 1e-4
        fano.plot(currents[visible], (exact.variance / exact.mean)[visible], color=color)

        # The same neuron, spike by spike.
        duration, window = (400.0, 100.0) if arguments.quick else (5100.0, 1000.0)
        spikes = simulate_spikes(
            one_neuron(noise), few, duration=duration, window=window, copies=64
        )
        layer = next(iter(spikes.layers.values()))
        rates.plot(few, 1000 * layer.rate, "o", color=color)
        fires = layer.rate[:, 0] > 1e-4
        fano.plot(few[fires], layer.fano[fires], "o", color=color)
        known = covary.activations.get("lif")(few, torch.full_like(few, noise**2)).mean
        worst = 1000 * (known - layer.rate).abs().max()
        print(f"noise {noise:g} mV/sqrt(ms): rates differ by at most {worst:.2f} spikes per s")
    rates.set_ylabel("rate (spikes per s)")
    rates.legend(title="lines: analytic, dots: simulated", fontsize=8, title_fontsize=8)
    fano.set_ylabel("Fano factor of the spike count")
    for panel in (rates, fano):
        panel.set_xlabel("mean current (mV/ms)")
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
