"""The card of a model that was trained elsewhere and imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from implicit_llm.cards.model_card import ModelFacts, render_card
from implicit_llm_contracts.runs.stage_context import StageContext

TEMPLATE = "checkpoint.md.j2"


def checkpoint_card(context: StageContext, model: Any, source: Mapping[str, Any], layout: str) -> str:
    """The card of `model`; `source` says where its files come from, `layout` in whose format they were."""
    facts = ModelFacts.of(model)
    head = ModelCardData(
        license="unknown",  # nothing but the weights and the configuration was read
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=facts.tags,
        base_model=source.get("hub"),
    )
    values = {
        "fingerprint": context.fingerprint,
        "model": facts,
        "source": source,
        "layout": layout,
    }
    return render_card(TEMPLATE, head, values)
