"""Pure functions from attention rows, values and outputs to numbers per head or per token."""

from sinklens.measures.intervals import Interval, paired_interval, ratio_interval
from sinklens.measures.outputs import gram, projected_norm, value_kind
from sinklens.measures.sinks import SinkRule, entropy, locate_sink, margin, received_mass

__all__ = [
    "Interval",
    "SinkRule",
    "entropy",
    "gram",
    "locate_sink",
    "margin",
    "paired_interval",
    "projected_norm",
    "ratio_interval",
    "received_mass",
    "value_kind",
]
