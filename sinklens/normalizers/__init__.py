"""The object under study as a value: row-wise maps from scores to weights, and edits of the sink."""

from sinklens.normalizers.base import Normalizer
from sinklens.normalizers.edits import (
    Constant,
    DropHeaviest,
    DropMatched,
    DropSink,
    HideSink,
    MeanSink,
    Mix,
    RenormalizeWithoutSink,
    SumToOne,
)
from sinklens.normalizers.off_by_one import LearnedSink, SoftmaxPlusOne
from sinklens.normalizers.relu import ReLU
from sinklens.normalizers.sigmoid import Sigmoid
from sinklens.normalizers.softmax import Softmax
from sinklens.normalizers.softpick import Softpick
from sinklens.normalizers.sparse import Entmax15, Sparsemax

__all__ = [
    "Constant",
    "DropHeaviest",
    "DropMatched",
    "DropSink",
    "Entmax15",
    "HideSink",
    "LearnedSink",
    "MeanSink",
    "Mix",
    "Normalizer",
    "ReLU",
    "RenormalizeWithoutSink",
    "Sigmoid",
    "Softmax",
    "SoftmaxPlusOne",
    "Softpick",
    "Sparsemax",
    "SumToOne",
]
