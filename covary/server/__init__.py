"""A run behind an HTTP address: ``covary serve``."""

from covary.server.application import application
from covary.server.limits import Limits, Refused
from covary.server.running import serve
from covary.server.served import Served

__all__ = ["Limits", "Refused", "Served", "application", "serve"]
