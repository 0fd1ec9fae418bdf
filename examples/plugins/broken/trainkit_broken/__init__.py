"""Plugins that are broken on purpose; each hurts those runs only that name it."""
