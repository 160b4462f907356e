"""The command line: ``python -m reproduction list | run | page``."""

from reproduction.cli import app

app()
