"""The stochastic networks that moments describe: drawn, simulated in time, and spiking; NIR."""

from covary.stochastic.chain import Chain, Stage
from covary.stochastic.exchange import from_nir, save_nir, to_nir
from covary.stochastic.sampling import Dynamics, relaxation_time, sample_steady, simulate_ou
from covary.stochastic.spiking import (
    Readout,
    SaturationWarning,
    SilenceWarning,
    Spiking,
    SpikingLayer,
    simulate_spikes,
)
from covary.stochastic.statistics import Estimate, StreamingMoments

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
