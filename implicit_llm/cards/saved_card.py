"""The card of a model that a user saves: how to load it, but not how it was trained, which is unknown here."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCardData

from implicit_llm.cards.model_card import render_card
from implicit_llm.cards.model_facts import ModelFacts

TEMPLATE = "saved.md.j2"


def saved_card(model: Any) -> str:
    """The card of `model`, without a licence: whoever trained the model chooses one."""
    facts = ModelFacts.of(model)
    head = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=facts.tags)
    solver = {key: value for key, value in (facts.solver or {}).items() if value is not None}
    return render_card(TEMPLATE, head, {"model": facts, "solver": solver})
