"""``python -m covary`` is ``covary``."""

from covary.cli import app

app()
