"""Write model cards for Hugging Face: a YAML head, which the hub reads, and a page for people.

A model card contains facts that are known when a model is saved, but nothing that differs between equal runs: no time,
host or device. It contains no name of a run either, because a name belongs to an experiment, not to a run's identity.
The code digest leaves out this module, so a new wording retrains nothing, and saved models keep their old texts.
`saved_card` is for a model that a user saves: it explains how to load the model, but not how it was trained.
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
    """Return a model card: a YAML head, and the template (a file beside this module) filled with `values`.

    head: fields that are added to those of every model card, or replace them; None removes a field.
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
    """Return the text of a value in a table: on one line, with escaped cell borders."""
    text = {True: "yes", False: "no", None: "–"}.get(value) if value is None or isinstance(value, bool) else str(value)
    return " ".join(str(text).split()).replace("|", r"\|")


def number(value: float | None) -> str:
    """Return the text of a number with four significant digits, or "not finite" for NaN, infinity and None."""
    return "not finite" if value is None or value != value or abs(value) == float("inf") else f"{value:.4g}"


# A model card shows these fields in this order, as far as the configuration has them.
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
    """The facts about a model that its model card shows.

    family: Mamba2, Llama, or the model type of Hugging Face. sizes: the SIZES of the configuration. solver: None for an
    explicit model. module: the top-level module of the model's class, implicit_llm or a plugin; "" for a class that is
    not based on this package, such as those of transformers.
    """

    model_type: str
    family: str
    num_parameters: int
    sizes: Mapping[str, Any]
    solver: SolverConfig | None
    module: str = ""

    @classmethod
    def of(cls, model: Any) -> ModelFacts:
        fields = model.config.to_dict()
        kind = str(model.config.model_type)
        sizes = {key: fields[key] for key in SIZES if fields.get(key) is not None}
        modules = [one.__module__.partition(".")[0] for one in type(model).__mro__]
        module = modules[0] if "implicit_llm" in modules else ""
        return cls(kind, FAMILY_NAMES.get(kind, kind), model.num_parameters(), sizes, solver_of(model), module)

    @property
    def is_ours(self) -> bool:
        """Whether the model is one of this package or of a plugin, which transformers alone cannot load."""
        return bool(self.module)

    @property
    def has_code(self) -> bool:
        """Whether the saved model comes with code by which transformers finds this package."""
        return self.model_type in FAMILY_NAMES

    @property
    def settings(self) -> dict[str, Any]:
        """Return the solver settings that are not None; they are empty for an explicit model."""
        values = {} if self.solver is None else self.solver.to_dict()
        return {key: value for key, value in values.items() if value is not None}

    @property
    def variant(self) -> str:
        return "explicit" if self.solver is None else "implicit"

    @property
    def tags(self) -> list[str]:
        """Return the tags in the head of the model card; the arXiv tag makes the hub show the paper."""
        own = ["implicit-llm", self.variant, "arxiv:2502.07827"] if self.is_ours else []
        return [self.family.lower(), *own]


def solver_words(solver: SolverConfig | None) -> str:
    """Return a phrase that describes how a phase computes its fixed point, given the settings of the solver."""
    if solver is None:
        return "explicit: no iterations"
    if solver.mode == "unrolled":
        return f"unrolled: {solver.num_unroll} iterations, all differentiated, damped by {solver.tau:g}"
    known = {"sequence": "of each sequence", "token": "of each token", "batch": "of the worst sequence"}
    what = known.get(solver.stop, f"by the rule {solver.stop}")  # an unknown rule is that of a plugin
    blocks = f" in blocks of {solver.block_len} tokens" if solver.block_len is not None else ""
    steps = f"{solver.phantom_steps} phantom-gradient steps with tau {solver.tau:g}"
    after = {
        "phantom": steps,
        "series": f"{steps}, whose gradient is a series at the last",
        "implicit": "one step with the gradient of the implicit function theorem",
    }
    return (
        f"({solver.max_iter}+{solver.steps_after_solve}): up to {solver.max_iter} iterations ({solver.method}){blocks} "
        f"until the relative residual {what} is below {solver.tol:g}, then {after[solver.gradient]}"
    )


def saved_card(model: Any) -> str:
    """Return the model card of `model`, without a licence, which the author of the model chooses."""
    return render_card("saved.md.j2", ModelFacts.of(model), {})


def checkpoint_card(fingerprint: str, model: Any, source: Mapping[str, Any], layout: str) -> str:
    """Return the model card of a model that was trained elsewhere and imported by the job with this fingerprint.

    source: the origin of the files. layout: their format.
    """
    values = {"fingerprint": fingerprint, "source": source, "layout": layout}
    return render_card(
        "checkpoint.md.j2",
        ModelFacts.of(model),
        values,
        license="unknown",  # only the weights and the configuration were read
        base_model=source.get("hub"),
    )


START = "start"


def training_card(context: StageContext, model: Any, summary: Mapping[str, Any]) -> str:
    """Return the model card of `model`, which the run of `context` trained; `summary` is that of the run's manifest."""
    facts, config = ModelFacts.of(model), context.config
    task = context.kinds.tasks[config["task"]]
    data = context.inputs["data"].manifest
    corpus = data.summary.get("corpus")
    dataset = (corpus or {}).get("dataset")  # a name on the hub; generated and local data have none
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
        license="unknown" if pretrained else "apache-2.0",  # a base model's licence is not known here
        pipeline_tag="text-generation" if config["task"] == LANGUAGE_MODEL else None,
        tags=[*facts.tags, config["task"].replace("_", "-")],
        datasets=None if dataset is None else [dataset],
        base_model=None if revision is None else pretrained,  # a name on the hub, not a folder
    )


def _phases(context: StageContext) -> list[dict[str, Any]]:
    """Return the rows of the table of phases, in the order of training; the last row is this phase.

    Before it is the phase from which it starts, if any. One more row, before both, summarises all earlier phases.
    """
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
    """Return the name of a word problem's group, followed by that of its monoid if it has one."""
    monoid = data.get("monoid", "none")
    return str(data.get("group", "a group")) + ("" if monoid == "none" else f" × {monoid}")
