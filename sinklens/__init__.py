"""sinklens: why attention heads park their weight on a meaningless token, tested on real heads.

Public names are listed in ``__init__.pyi`` and loaded when first used: importing the package costs nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
