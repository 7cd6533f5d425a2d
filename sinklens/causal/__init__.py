"""The normalization test on real heads: interventions, controls, calibration, inference, verdict."""

from sinklens.causal.calibration import HeadCalibration, ReLUFit, calibrate, fit_relu
from sinklens.causal.contrasting import Contrast, Unit, contrast
from sinklens.causal.desinking import Desinking, desink
from sinklens.causal.interventions import CORE, FULL, INTERVENTIONS, SIX, Intervention, interventions
from sinklens.causal.recipe import Recipe
from sinklens.causal.screening import Screening, screen
from sinklens.causal.verdicts import MEANINGS, Verdicts, judge

__all__ = [
    "CORE",
    "FULL",
    "INTERVENTIONS",
    "MEANINGS",
    "SIX",
    "Contrast",
    "Desinking",
    "HeadCalibration",
    "Intervention",
    "ReLUFit",
    "Recipe",
    "Screening",
    "Unit",
    "Verdicts",
    "calibrate",
    "contrast",
    "desink",
    "fit_relu",
    "interventions",
    "judge",
    "screen",
]
