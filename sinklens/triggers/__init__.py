"""Trigger-conditional heads: heads that sleep on the sink until a token wakes them, or park when one comes.

Names are loaded when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
