"""One self-contained page from whatever runs lie in a folder: no network, no server, light and dark."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
