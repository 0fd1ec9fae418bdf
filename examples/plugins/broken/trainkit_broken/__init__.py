"""Plugins that are broken on purpose; each affects only runs that name it."""
