"""Configuration: schema.py says what can be set, loader.py reads it. Imports no torch."""
