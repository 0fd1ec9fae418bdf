"""The configuration of reward modelling, and what the configurations of trainers have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from transformers import TrainingArguments

from trainkit_migrate import refusing
from trainkit_trl.arguments import refuse_unknown


@dataclass
class OldArguments(TrainingArguments):
    """The settings of `transformers.TrainingArguments`, and some that it no longer has."""

    adafactor: bool = False
    dispatch_batches: bool | None = None
    evaluation_strategy: str | None = None
    fp16_backend: str = "auto"
    fp16_opt_level: str = "O1"
    fsdp_min_num_params: int = 0
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    group_by_length: bool = False
    half_precision_backend: str = "auto"
    include_inputs_for_metrics: bool = False
    include_tokens_per_second: bool = False
    jit_mode_eval: bool = False
    logging_dir: str | None = None
    mp_parameters: str = ""
    no_cuda: bool = False
    overwrite_output_dir: bool = False
    past_index: int = -1
    per_gpu_eval_batch_size: int | None = None
    per_gpu_train_batch_size: int | None = None
    push_to_hub_model_id: str | None = None
    push_to_hub_organization: str | None = None
    push_to_hub_token: str | None = None
    ray_scope: str | None = "last"
    save_safetensors: bool = True
    sharded_ddp: str = ""
    split_batches: bool = False
    torchdynamo: str | None = None
    tpu_metrics_debug: bool = False
    tpu_num_cores: int | None = None
    use_ipex: bool = False
    use_legacy_prediction_loop: bool = False
    use_mps_device: bool = False
    warmup_ratio: float = 0.0
    xpu_backend: str | None = None

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse settings that there are not."""
        names = {each.name for each in fields(cls)}
        own = [*cls.__annotations__, "what TrainingArguments takes"]
        refuse_unknown(cls, {name: value for name, value in given.items() if name not in names}, own)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.evaluation_strategy is not None:
            self.eval_strategy, self.evaluation_strategy = self.evaluation_strategy, None
        if getattr(self, "activation_checkpointing", False) is None:  # its new name, which also sets the old one
            self.activation_checkpointing = self.gradient_checkpointing
        super().__post_init__()  # type: ignore[no-untyped-call]


OLD = tuple(OldArguments.__annotations__)
"""The names of these."""


@dataclass
class RewardConfig(OldArguments):
    """Settings of `RewardTrainer`: those of `OldArguments`, and one more.

    ``max_length`` is the largest number of tokens of a side.
    """

    max_length: int | None = None
    gradient_checkpointing: bool | None = True


__getattr__ = refusing(__name__)
