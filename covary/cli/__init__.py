"""The command line: ``covary train | evaluate | report | data | demo``."""

from covary.cli.app import app

__all__ = ["app"]
