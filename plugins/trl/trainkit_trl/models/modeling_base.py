"""The base class of models with a value head, and references."""

from trainkit.models import PreTrainedModelWrapper, create_reference_model
from trainkit_migrate import refusing

__all__ = ["PreTrainedModelWrapper", "create_reference_model"]

__getattr__ = refusing(__name__)
