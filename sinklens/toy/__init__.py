"""The paper's models from scratch: trigger tasks, hand-written and trained models, figures, and the factorial.

Models run on the same normalizer objects as patches of pretrained heads. Names are loaded when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
