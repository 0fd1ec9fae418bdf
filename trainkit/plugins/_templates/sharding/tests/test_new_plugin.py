"""Tests of new_plugin: the conformance checks of trainkit, and its own behaviour."""

from collections.abc import Callable
from typing import Any

import pytest
from accelerate import Accelerator

from trainkit import TRLConfig
from trainkit.errors import ConfigError
from trainkit.plugins import get_sharding
from trainkit_kit import parametrize_checks


@parametrize_checks("new_plugin")
def test_it_passes(check: Callable[[], None]) -> None:
    """Run one of the conformance checks of trainkit. Each is a test case of its own."""
    check()


def test_what_it_was_not_tried_with_is_refused() -> None:
    """Check the message for an adapter. A run of one process would not divide the model, nor make a sharding."""
    config: TRLConfig[Any] = TRLConfig(method="rloo", model={"peft_config": {"r": 2}})
    sharding = get_sharding("new_plugin").made(Accelerator(cpu=True))
    with pytest.raises(ConfigError, match=r"new_plugin was not tried with model\.peft_config"):
        sharding.check(config)
