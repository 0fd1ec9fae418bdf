"""Models with several adapters, of which one is trained and one may be the reference."""

from __future__ import annotations

import copy
from typing import Any

from trainkit.errors import ConfigError, suggest


def reference_of(model: Any, trained: str | None, reference: str | None, *, needed: bool = True) -> Any:
    """Activate the adapter that is trained, and return the reference of a model with adapters.

    It is the model with another adapter, or without any if none is named, as in TRL 0.8. Weights that are not trained
    are shared with the model, not copied.

    Args:
        model: the model.
        trained: ``model_adapter_name``; None: ``"default"`` if a reference is named, else the active adapter.
        reference: ``ref_adapter_name``.
        needed: whether there is a reference, and it is not another model.

    Returns:
        The reference; None if it is not needed, or if none is named and the model is no `peft.PeftModel` with adapters
        in its layers, so that trainkit makes it.

    Raises:
        ConfigError: the model has no such adapter, or both are the same.
    """
    names = [*getattr(model, "peft_config", {})]
    if reference is not None and trained is None:
        trained = "default"
    for argument, name in (("model_adapter_name", trained), ("ref_adapter_name", reference)):
        if name is not None and name not in names:
            has = f"the adapters {', '.join(names)}" if names else "no adapter"
            raise ConfigError(
                f"{argument} is {name!r}, and the model has {has}{suggest(name, names)}; give a peft.PeftModel with "
                f"it: model.load_adapter(path, adapter_name={name!r})"
            )
    if trained is not None and trained == reference:
        raise ConfigError(
            f"model_adapter_name and ref_adapter_name are both {trained!r}, and the reference would move; load the "
            "adapter twice, under two names"
        )
    if trained is not None:
        model.set_adapter(trained)
    if not needed or (reference is None and not hasattr(getattr(model, "base_model", None), "unload")):
        return None
    shared = {id(each): each for each in model.parameters() if not each.requires_grad}
    compared = copy.deepcopy(model, shared)
    if reference is None:
        return compared.unload()
    compared.set_adapter(reference)
    for name in names:
        if name != reference:
            compared.delete_adapter(name)
    return compared.requires_grad_(False)
