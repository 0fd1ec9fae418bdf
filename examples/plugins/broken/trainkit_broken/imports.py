"""Imports a module that is not installed."""

import nothing_of_this_name  # noqa: F401
