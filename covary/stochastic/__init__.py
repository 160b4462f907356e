"""The stochastic networks that moments describe: drawn, simulated in time, and spiking.

``sample_steady`` draws the steady state, ``simulate_ou`` follows Ornstein-Uhlenbeck processes,
``simulate_spikes`` leaky integrate-and-fire neurons; all take a moment neural network and give the
moments that it claims to have. ``to_nir`` and ``from_nir`` exchange spiking networks with other
tools.
"""

from covary.stochastic.chain import Chain, Stage
from covary.stochastic.counts import Readout, SpikingLayer
from covary.stochastic.exchange import from_nir, save_nir, to_nir
from covary.stochastic.ou import Dynamics, relaxation_time, simulate_ou
from covary.stochastic.spiking import (
    SaturationWarning,
    SilenceWarning,
    Spiking,
    simulate_spikes,
)
from covary.stochastic.statistics import Estimate, StreamingMoments
from covary.stochastic.steady import sample_steady

__all__ = [
    "Chain",
    "Dynamics",
    "Estimate",
    "Readout",
    "SaturationWarning",
    "SilenceWarning",
    "Spiking",
    "SpikingLayer",
    "Stage",
    "StreamingMoments",
    "from_nir",
    "relaxation_time",
    "sample_steady",
    "save_nir",
    "simulate_ou",
    "simulate_spikes",
    "to_nir",
]
