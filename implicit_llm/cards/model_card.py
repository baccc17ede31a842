"""A model card of Hugging Face: a YAML head that its hub reads, and a page for people.

Cards tell what is known when a model is saved, and nothing that differs between equal runs: no time, host or device,
and no name either, which belongs to an experiment and not to the identity.
They are plumbing of the code digest: another wording trains nothing again, and saved models keep the card they have.
`saved_card` is for a model that a user saves: it says how to load the model, but not how it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData

from implicit_llm_contracts.config.flops import FAMILY_NAMES
from implicit_llm_contracts.config.solver import SolverConfig, solver_of
from implicit_llm_contracts.config.tasks import LANGUAGE_MODEL
from implicit_llm_contracts.runs.stage_context import StageContext

FILE_NAME = "README.md"
PAPER = {
    "authors": "Mark Schöne, Babak Rahmani, Heiner Kremer, Fabian Falck, Hitesh Ballani, Jannes Gladrow",
    "bibtex_authors": "Schöne, Mark and Rahmani, Babak and Kremer, Heiner and Falck, Fabian and Ballani, Hitesh "
    "and Gladrow, Jannes",
    "title": "Implicit Language Models are RNNs: Balancing Parallelization and Expressivity",
    "arxiv": "2502.07827",
}


def render_card(template: str, model: ModelFacts, values: Mapping[str, Any], **head: Any) -> str:
    """The card: the template of this folder with `values`, below what all heads say of a model and these fields.

    Raises: jinja2.UndefinedError for a missing value.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # noqa: S701  (Markdown, not HTML)
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": cell, "number": number, "commas": lambda value: f"{value:,}"}
    page = environment.get_template(template).render(**values, model=model, paper=PAPER)
    fields = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": model.tags} | head
    return f"---\n{ModelCardData(**fields).to_yaml(line_break=chr(10))}\n---\n\n{page}"


def cell(value: Any) -> str:
    """A value in a table: on one line, without borders of cells."""
    text = {True: "yes", False: "no", None: "–"}.get(value) if value is None or isinstance(value, bool) else str(value)
    return " ".join(str(text).split()).replace("|", r"\|")


def number(value: float | None) -> str:
    """A measured number to four digits."""
    return "not finite" if value is None or value != value or abs(value) == float("inf") else f"{value:.4g}"


# In this order; whichever of them a configuration has.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "expand",
    "head_dim",
    "state_size",
    "n_groups",
    "conv_kernel",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "weight_norm",
)


@dataclass(frozen=True)
class ModelFacts:
    """family: Mamba2, Llama, or the model type that Hugging Face knows; solver: None for an explicit model."""

    model_type: str
    family: str
    num_parameters: int
    sizes: Mapping[str, Any]
    solver: SolverConfig | None

    @classmethod
    def of(cls, model: Any) -> ModelFacts:
        fields = model.config.to_dict()
        kind = str(model.config.model_type)
        sizes = {key: fields[key] for key in SIZES if fields.get(key) is not None}
        return cls(kind, FAMILY_NAMES.get(kind, kind), model.num_parameters(), sizes, solver_of(model))

    @property
    def is_ours(self) -> bool:
        """Whether it takes `import implicit_llm` to load it."""
        return self.model_type in FAMILY_NAMES

    @property
    def settings(self) -> dict[str, Any]:
        """Return the solver's settings that are set; empty for an explicit model."""
        values = {} if self.solver is None else self.solver.to_dict()
        return {key: value for key, value in values.items() if value is not None}

    @property
    def variant(self) -> str:
        return "explicit" if self.solver is None else "implicit"

    @property
    def tags(self) -> list[str]:
        """Return the tags of the card's head; the arXiv tag makes the hub show the paper."""
        own = ["implicit-llm", self.variant, "arxiv:2502.07827"] if self.is_ours else []
        return [self.family.lower(), *own]


def solver_words(solver: SolverConfig | None) -> str:
    """How a phase finds its fixed point, in one sentence, by the settings of the model's solver."""
    if solver is None:
        return "explicit: no iterations"
    if solver.mode == "unrolled":
        return f"unrolled: {solver.num_unroll} iterations, all differentiated, damped by {solver.tau:g}"
    what = {"sequence": "of each sequence", "token": "of each token", "batch": "of the worst sequence"}[solver.stop]
    return (
        f"({solver.max_iter}+{solver.phantom_steps}): up to {solver.max_iter} iterations "
        f"({solver.method}) until the relative residual {what} is below {solver.tol:g}, then "
        f"{solver.phantom_steps} phantom-gradient steps with tau {solver.tau:g}"
        f"{', whose gradient is a series at the last' if solver.gradient == 'series' else ''}"
    )


def saved_card(model: Any) -> str:
    """The card of `model`, without a licence: whoever trained the model chooses one."""
    return render_card("saved.md.j2", ModelFacts.of(model), {})


def checkpoint_card(fingerprint: str, model: Any, source: Mapping[str, Any], layout: str) -> str:
    """The card of a model that was trained elsewhere and imported, by the job with this fingerprint.

    `source` says where its files come from, `layout` in whose format they were.
    """
    values = {"fingerprint": fingerprint, "source": source, "layout": layout}
    return render_card(
        "checkpoint.md.j2",
        ModelFacts.of(model),
        values,
        license="unknown",  # nothing but the weights and the configuration was read
        base_model=source.get("hub"),
    )


START = "start"


def training_card(context: StageContext, model: Any, summary: Mapping[str, Any]) -> str:
    """The card of `model`, which the run of `context` trained; `summary` is that of its manifest."""
    facts, config = ModelFacts.of(model), context.config
    task = context.kinds.tasks[config["task"]]
    data = context.inputs["data"].manifest
    corpus = data.summary.get("corpus")
    dataset = (corpus or {}).get("dataset")  # a name on the hub, which what is made here or read of files does not have
    pretrained, revision = (config["model"].get(key) for key in ("pretrained", "revision"))
    values = {
        "fingerprint": context.fingerprint,
        "config": config,
        "task": task.learns.format(group=_group(data.config)),
        "limits": task.limits,
        "pretrained": pretrained,
        "revision": revision,
        "phases": _phases(context),
        "is_last": config["phase"]["end_step"] == config["total_steps"],
        "summary": summary,
        "data": data,
        "upstream": sorted(data.upstream.items()) if len(data.upstream) < 4 else [],
        "num_upstream": len(data.upstream),
        "corpus": corpus,
    }
    return render_card(
        "training.md.j2",
        facts,
        values,
        license="unknown" if pretrained else "apache-2.0",  # who fine-tunes is bound by the licence of the base
        pipeline_tag="text-generation" if config["task"] == LANGUAGE_MODEL else None,
        tags=[*facts.tags, config["task"].replace("_", "-")],
        datasets=None if dataset is None else [dataset],
        base_model=None if revision is None else pretrained,  # a name on the hub, not a folder
    )


def _phases(context: StageContext) -> list[dict[str, Any]]:
    """The phase, the one that it started from, and the fingerprint of what came before these."""
    phase = context.config["phase"]
    rows = [_phase(phase, phase["end_step"], context.fingerprint)]
    if START in context.inputs:
        start = context.inputs[START].manifest
        rows.insert(0, _phase(start.config["phase"], phase["start_step"], start.fingerprint))
        if START in start.upstream:
            earlier = {"name": "earlier phases", "first": 0, "last": rows[0]["first"], "solver": "see that run"}
            rows.insert(0, {**earlier, "fingerprint": start.upstream[START]})
    return rows


def _phase(phase: Mapping[str, Any], last: int, fingerprint: str) -> dict[str, Any]:
    solver = None if phase["solver"] is None else SolverConfig.of(phase["solver"])
    row = {"name": phase["name"], "first": phase["start_step"], "last": last}
    return {**row, "solver": solver_words(solver), "fingerprint": fingerprint}


def _group(data: Mapping[str, Any]) -> str:
    """What the elements of a word problem are of."""
    monoid = data.get("monoid", "none")
    return str(data.get("group", "a group")) + ("" if monoid == "none" else f" × {monoid}")
