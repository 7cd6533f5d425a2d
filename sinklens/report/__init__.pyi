from .gathering import Runs as Runs
from .gathering import gather as gather
from .page import report as report
