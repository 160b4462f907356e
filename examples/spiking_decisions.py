"""For a computational neuroscientist: train spiking neurons by their moments, then let them spike.

python -m examples.spiking_decisions
"""

from __future__ import annotations

import torch
from matplotlib import pyplot as plt

import covary
from covary.stochastic import simulate_spikes
from examples.drawing import BLUE, GREEN, ORANGE, options, save
from examples.plain_digits import load, train


def main() -> None:
    arguments = options(__doc__)
    x, y, x_test, y_test = load()
    x, x_test, y_test = x.flatten(1), x_test.flatten(1)[:100], y_test[:100]

    figure, panel = plt.subplots(figsize=(8, 3.8))
    for noise, color in ((1.0, ORANGE), (4.5, BLUE)):
        torch.manual_seed(0)
        net = covary.mlp(
            [64, 50, 10], activation="lif", noise=noise, batch_norm=True, covariance="shared"
        )
        train(net, x, y, 2 if arguments.quick else 30)
        net = covary.with_covariance(net, "full").eval()
        with torch.no_grad():
            by_moments = (net(x_test).mean.argmax(1) == y_test).float().mean().item()

        times = [5.0, 10.0, 20.0, 50.0, 100.0] + ([] if arguments.quick else [200.0, 500.0])
        spikes = simulate_spikes(
            net,
            x_test,
            duration=times[-1],
            burn_in=0.0,
            window=times[-1],
            copies=32,
            times=times,
        )
        right, _ = spikes.readout.accuracy(y_test)
        print(f"noise {noise:g} mV/sqrt(ms): {by_moments:.0%} right by moments")
        for t, each in zip(times, right, strict=True):
            print(f"  by spikes after {t:g} ms: {each:.0%}")
        panel.plot(times, 100 * right, "o-", color=color, label=f"spikes, noise {noise:g}")
        panel.axhline(100 * by_moments, color=color, linestyle="--", label="moments, same network")
    panel.axhline(10, color=GREEN, linestyle=":", label="chance")
    panel.set_xscale("log")
    panel.set_xlabel("time since the digit is shown (ms)")
    panel.set_ylabel("right decisions (%)")
    panel.set_ylim(0, 102)
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
