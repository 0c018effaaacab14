"""The engine: runners, drafters, verification, and the one decode loop; names are imported when they are asked for."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
