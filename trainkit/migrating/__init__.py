"""The settings and names of trlX and TRL, and what becomes of them: data that core, adapters and documents share.

``<framework>.toml`` has every field of a framework's configuration, and its public names; ``names.toml`` has names that
are common among frameworks. This room imports neither torch nor the configuration.
"""

from __future__ import annotations

from trainkit.migrating.scripts import Rewritten, rewritten
from trainkit.migrating.tables import FRAMEWORKS, Framework, Setting, framework, known_names, known_values, notes
from trainkit.migrating.translation import Remark, Translation, translate, translate_sampling

__all__ = [
    "FRAMEWORKS",
    "Framework",
    "Remark",
    "Rewritten",
    "Setting",
    "Translation",
    "framework",
    "known_names",
    "known_values",
    "notes",
    "rewritten",
    "translate",
    "translate_sampling",
]
