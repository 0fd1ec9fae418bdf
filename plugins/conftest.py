"""The tiers of tests hold for the tests of plugins, when they are run alone, too."""

from tiers import pytest_collection_finish, pytest_collection_modifyitems, pytest_runtest_call  # noqa: F401
