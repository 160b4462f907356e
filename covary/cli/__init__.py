"""The command line: ``covary train | evaluate | fidelity | report | data | demo``."""

from covary.cli.app import app

__all__ = ["app"]
