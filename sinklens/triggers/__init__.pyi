from .features import FAMILIES as FAMILIES
from .features import Feature as Feature
from .features import TokenTable as TokenTable
from .finding import find_triggers as find_triggers
from .report import TriggerReport as TriggerReport
from .study import Protocol as Protocol
