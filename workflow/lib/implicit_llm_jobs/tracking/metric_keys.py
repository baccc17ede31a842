"""The metrics that MLflow shows, and their keys: those of the journal, in the sections that its charts make of a slash.

A key, once given, stays: charts, searches and stores of earlier runs name it. What is not listed keeps the journal's
name, in the section of its stage.
"""

import re

# Of training, by section; "" is the one that MLflow calls "Model metrics".
TRAINING: dict[str, dict[str, str]] = {
    "": {
        "loss": "nats per label, over the steps since the last point",
        "accuracy": "share of right labels of the training batches (CatbAbI)",
        "accuracy_last10": "share of right labels among the last ten of a sequence (word problems)",
        "grad_norm": "norm of the gradient before clipping",
        "learning_rate": "of the step",
    },
    "solver": {
        "num_iter": "iterations of the solver, mean over sequences",
        "f_evaluations": "num_iter and the phantom or unrolled steps after it",
        "residual": "largest relative residual of a batch",
        "unconverged_share": "share of the tokens without a fixed point",
        "mode_gap": "loss in evaluation mode minus that in training mode, on the same tokens",
        "spectral_radius": "of the Jacobian at the fixed point",
    },
    "cost": {
        "tokens": "trained on since the first phase",
        "flops": "spent since the first phase",
        "tokens_per_s": "over all processes",
        "flops_per_s": "over all processes",
        "mfu": "share of the peak of the devices",
        "memory_gib": "largest use of a GPU's memory",
    },
}
SECTIONS = {"evaluate": "evaluation", "data": "data"}  # of other stages: accuracy.<data set>.<mode>, and the like
SUMMARY = "summary"  # one number a run, from its manifest, for tables and parallel coordinates
SYSTEM = "system"  # of the machine, with MLflow's own names; MLflow has a page for them

KEY_CHARS = 200
_REFUSED = re.compile(r"[^\w\-. /:]")  # by MLflow
_SECTION_OF = {key: section for section, keys in TRAINING.items() for key in keys}


def mlflow_key(stage: str, key: str) -> str:
    """The key under which MLflow has the journal's `key`; one that has a section stays in it."""
    key = _REFUSED.sub("-", key.replace("@", "."))[:KEY_CHARS]
    section = "" if "/" in key else _SECTION_OF.get(key, "") if stage == "train" else SECTIONS.get(stage, "")
    return f"{section}/{key}" if section else key
