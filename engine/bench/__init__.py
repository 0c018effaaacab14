"""A run: its configuration and plan, the session that it becomes, its passes, and their record."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
