"""Rows, batches and sequences; the formats of datasets; the pipelines of rows and the rollout store."""

from trainkit.data.batches import Batch, Images, Preferences, Rollouts, Row, Sequences, TokenBatch
from trainkit.data.chat import PLAIN_TEMPLATE, TEMPLATES, Chat, is_conversation, plain_messages
from trainkit.data.formats import (
    Prompts,
    are_rated,
    check_both_labels,
    finite,
    first_format,
    formatted,
    labelled,
    preference_rows,
    prompt_rows,
    prompted,
    recognise,
    sample_rows,
    taken_apart,
    unrendered,
    written_prompts,
)
from trainkit.data.images import save_processor
from trainkit.data.pipeline import Pipeline, PromptEncoder, Stream, encode_sample, is_stream
from trainkit.data.store import RolloutStore, shuffled
from trainkit.data.tokenised import Completions, output_spans

__all__ = [
    "PLAIN_TEMPLATE",
    "TEMPLATES",
    "Batch",
    "Chat",
    "Completions",
    "Images",
    "Pipeline",
    "Preferences",
    "PromptEncoder",
    "Prompts",
    "RolloutStore",
    "Rollouts",
    "Row",
    "Sequences",
    "Stream",
    "TokenBatch",
    "are_rated",
    "check_both_labels",
    "encode_sample",
    "finite",
    "first_format",
    "formatted",
    "is_conversation",
    "is_stream",
    "labelled",
    "output_spans",
    "plain_messages",
    "preference_rows",
    "prompt_rows",
    "prompted",
    "recognise",
    "sample_rows",
    "save_processor",
    "shuffled",
    "taken_apart",
    "unrendered",
    "written_prompts",
]
