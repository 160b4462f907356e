"""Numbers as others printed them: cited, not measured."""
