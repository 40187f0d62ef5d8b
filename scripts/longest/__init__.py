"""Searches for the longest sequence: over plans, and over real steps."""
