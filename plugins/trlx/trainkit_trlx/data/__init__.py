"""Configurations and data types."""
