"""Layouts of small random-weight models, one module each, and what they share."""
