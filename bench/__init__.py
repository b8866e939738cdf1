"""Measurements of forkd, repeatable: `python -m bench`."""
