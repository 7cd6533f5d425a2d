"""The normalization test on real heads: interventions, controls, calibration, inference."""

from sinklens.causal.calibration import head_means
from sinklens.causal.contrasting import Contrast, Unit, contrast
from sinklens.causal.interventions import CORE, HeadMeans, Intervention

__all__ = ["CORE", "Contrast", "HeadMeans", "Intervention", "Unit", "contrast", "head_means"]
