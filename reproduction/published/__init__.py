"""Numbers as others printed them, and networks as others trained them: cited, not made here."""
