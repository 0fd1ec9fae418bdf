"""The kit's checks of shardings: a sound one passes, and broken ones are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.errors import RegistryError
from trainkit.plugins import discover, get_sharding, register_sharding
from trainkit_kit import ConformanceError, check_plugin

SOUND = """
import torch
from trainkit import register_sharding
from trainkit.errors import ConfigError
from trainkit.trainer.sharding import FSDP2

class Sound(FSDP2):
    def check(self, config):
        if config.method.name != "rloo":
            raise ConfigError("only rloo")
"""
BROKEN = {
    "never_together": (
        "def synchronised(self, last):\n        return super().synchronised(False)",
        "trains_as_replicas",
    ),
    "own_norm": (
        "def clip(self, limit):\n        norm = super().clip(None)\n        own = [p.grad.to_local() for p in "
        "self.policy.parameters() if p.grad is not None]\n        by = limit / torch.stack([g.norm() for g in own])"
        ".norm()\n        [g.mul_(by.clamp(max=1)) for g in own]\n        return norm",
        "trains_as_replicas",
    ),
    "state_without_a_moment": (
        "def own_part(self, state, optimizer):\n        found = super().own_part(state, optimizer)\n        "
        "[each.pop('exp_avg', None) for each in found['state'].values()]\n        return found",
        "checkpoints_are_whole",
    ),
    "sound": ("...", ""),
}


def made(body: str) -> str:
    return f'{SOUND}\n@register_sharding("fake-shards")\nclass Fake(Sound):\n    {body}\n'


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*BROKEN])
def test_broken_shardings_are_found_and_a_sound_one_passes(fault: str, install: Callable[..., object]) -> None:
    body, found = BROKEN[fault]
    install(f"fake-{fault}", {"fake-shards": f"fake_shards_{fault}"}, made(body), kind="sharding")
    if not found:
        check_plugin("fake-shards")
        return
    with pytest.raises(ConformanceError, match=f"{found}: "):
        check_plugin("fake-shards")


def test_an_installed_sharding_is_listed_and_named(install: Callable[..., object]) -> None:
    install("fake-shards", {"fake-shards": "fake_shards_module"}, made("..."), kind="sharding")
    (found,) = (plugin for plugin in discover() if plugin.name == "fake-shards")
    assert (found.kind, found.why) == ("sharding", "")
    assert get_sharding("Fake-Shards").made.__name__ == "Fake"


def test_what_is_no_sharding_is_refused() -> None:
    with pytest.raises(RegistryError, match=r"it does not derive from trainkit\.Sharding"):
        register_sharding("wrong")(int)
    with pytest.raises(RegistryError, match="belongs to trainkit's own sharding"):
        register_sharding("fsdp2")(get_sharding("none").made)
    with pytest.raises(RegistryError, match=r"'ray' is no sharding; train\.sharding names"):
        get_sharding("ray")
