"""Define the command `evaluate`, which has a sub-command for each kind of evaluation.

The options of a kind are the settings that `implicit_llm_contracts/config/evaluation_kinds.py` describes, and the
settings of an evaluation mode. The evaluation is a job with its own identity, so the same call finds its result again.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
import yaml

from implicit_llm_contracts.config.evaluation import RELEASED_CRITERION, ModeConfig, SweepConfig
from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, MODE_SETTINGS, EvaluationKind
from implicit_llm_contracts.config.fill import as_config, fill
from implicit_llm_contracts.config.word_problem import MONOID_ORDERS, WordProblemConfig, product_order
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.plugins import PLUGINS
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_contracts.runs.fetched_files import CONFIG_FILE
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_contracts.runs.run_directory import METRICS, is_result_shown
from implicit_llm_jobs.tracking.mlflow_store import sqlite_uri
from implicit_llm_workflow.commands import options
from implicit_llm_workflow.commands.jobs import EVALUATION, MACHINE_PANEL, JobRuntime, Log, run_job
from implicit_llm_workflow.commands.options import OptionError
from implicit_llm_workflow.experiment_files.evaluations import completed_settings
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.yaml_files import experiment_path
from implicit_llm_workflow.file_digests import FileDigests, safe_digests
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import job_code, job_digest
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.project_dirs import trained_models
from implicit_llm_workflow.results.listing import ABOUT
from implicit_llm_workflow.text import number_text, plain_table

MODES_PANEL = "How an implicit model is solved"
# The settings that the name of a mode implies; other modes are named like their `eval_mode`.
_OWN: dict[str, dict[str, Any]] = {RELEASED_CRITERION: {"eval_mode": "simultaneous", "eval_stop": "batch"}}
ROOT = options.RESULTS / "by-hand"
SHOWN_DIGITS = 8
RELEASED_SHARD = 131_072  # sequences per shard of a data set that is converted from a file of the authors' generator
TOKENIZER = "tokenizer"
# The harness receives all arguments after its name, also options that this console would understand itself.
HANDED_OVER = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

evaluate = typer.Typer(
    name="evaluate",
    help="Evaluate any model manually: one sub-command for each kind of evaluation.\n\n"
    "The model is a run directory, or a checkpoint of transformers, of the published layout, or of the original "
    "Mamba2 release. The result gets a run directory of its own, where the same call finds it. Snakemake runs the "
    "evaluations of an experiment, each by one call of `implicit-llm job`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

ModelDir = Annotated[
    Path,
    typer.Option(
        help="Name of a trained model of the package, run directory of a training phase, or any checkpoint: of "
        "transformers, in the published layout, or of the original Mamba2 release.",
        metavar="MODEL",
    ),
]
DataDirs = Annotated[
    list[Path] | None,
    typer.Option(
        help="Run directory of a data set, or a file of the authors' generator, such as test_A5_L256_P050.bin. "
        "Repeatable. By default the shortest test set on which its experiment evaluates the model, or those of "
        "--lengths; it is made if it is not there.",
        metavar="DIR",
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Run directory of the evaluation; else below results/by-hand/.", metavar="DIR")
]
Digests = Annotated[
    list[str] | None,
    typer.Option(
        help="Digest that a file of the checkpoint must have. A pytorch_model.bin is read only if named here.",
        metavar="FILE=DIGEST",
    ),
]
Mode = Annotated[
    list[str] | None,
    typer.Option(
        help="blockwise (the default), simultaneous, sequential, as_trained (the training pass), or "
        "released-criterion: simultaneous, with the released code's criterion. Repeatable. An explicit model is "
        "evaluated once, in the mode `parallel`.",
        metavar="NAME",
        rich_help_panel=MODES_PANEL,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        help="Run each mode once for each value, such as max-iter=4,8 or tol=0.2,0.05. Repeatable.",
        metavar="KEY=VALUES",
        rich_help_panel=MODES_PANEL,
    ),
]


def make_command(name: str) -> Callable[..., None]:
    """Return the function from which Typer builds the sub-command of a kind."""
    kind, command_name = EVALUATION_KINDS[name], name.replace("_", "-")
    offered = {key: text for key, text in EVALUATION.items() if key not in kind.refused}
    machine = options.field_options(JobRuntime, offered, MACHINE_PANEL)

    def command(
        model: ModelDir, data: DataDirs = None, out: Out = None, sha256: Digests = None, log: Log = None, **values: Any
    ) -> None:
        config: dict[str, Any] = {"kind": name}
        if kind.has_modes:
            config["modes"] = _modes(values["mode"] or kind.default_modes, _fields(ModeConfig, MODE_SETTINGS, values))
            config |= {"sweep": dict(map(_swept, values["sweep"]))} if values["sweep"] else {}
        settings = _fields(kind.config, kind.settings, values)
        config |= completed_settings(name, settings, f"evaluate {command_name}")
        folder = _packaged(model)
        test_sets = _test_sets(command_name, kind, data or _own_test_sets(model, name, settings.get("lengths")))
        if kind.lengths == "all" and "lengths" not in config:
            config["lengths"] = sorted({found.config["length"] for _, found in test_sets.values()})
        if kind.lengths != "shortest":  # for the others, the job takes the length from the data and checks the settings
            fill(kind.config, config, f"evaluate {command_name}")
        os.environ.setdefault("MLFLOW_TRACKING_URI", sqlite_uri(ROOT.parent.resolve() / "mlflow.db"))
        inputs = {"model": _model(folder, sha256 or [], log), **test_sets}
        identity = _identity(command_name, config, {role: manifest for role, (_, manifest) in inputs.items()})
        run_dir = out or ROOT / "evaluate" / identity.name
        directories = {role: str(folder) for role, (folder, _) in inputs.items()}
        runtime = options.given(JobRuntime, {key: values[key] for key in machine})
        run_job(run_dir, identity.to_json(directories), log, runtime)
        _show(run_dir, kind.columns)

    options.with_options(command, {**_setting_options(kind), **machine})
    example = f"implicit-llm evaluate {command_name} {kind.example}".replace(" --", " \\\n        --")
    # Without a paragraph before the example, Typer removes its indentation and joins its lines.
    about = "It prints the numbers and the path of their file."
    command.__doc__ = f"{kind.summary}\n\n{about}\n\n**Example**\n\n    {example}"
    return command


def _setting_options(kind: EvaluationKind) -> dict[str, inspect.Parameter]:
    """Return the options of the evaluation, without defaults: an option that is not set does not enter the identity."""
    found = options.field_options(kind.config, kind.settings, "Options", has_defaults=False)
    if kind.has_modes:
        found |= options.field_options(ModeConfig, MODE_SETTINGS, MODES_PANEL, has_defaults=False)
        found |= {
            key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for key, hint in (("mode", Mode), ("sweep", Sweep))
        }
    return found


def _modes(names: Iterable[str], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the modes with these names and the settings `shared`, but the block length only for blockwise mode.

    The block length is removed from `shared`.

    Raises: OptionError for a block length without this mode.
    """
    of_mode = {**_OWN, "blockwise": {key: shared.pop(key) for key in ("eval_block_len",) if key in shared}}
    if of_mode["blockwise"] and "blockwise" not in names:
        raise OptionError("--block-len: is for the mode blockwise; add --mode blockwise, or leave it out")
    return [{"name": name, "eval_mode": name, **shared, **of_mode.get(name, {})} for name in names]


def _swept(option: str) -> tuple[str, list[Any]]:
    """Return a swept field and its values: ("eval_max_iter", [4, 8]) for "max-iter=4,8". Raises: OptionError."""
    fields = {options.option_of(field).lstrip("-"): field for field in get_type_hints(SweepConfig)}
    key, _, text = option.partition("=")
    if key not in fields:
        raise OptionError(f"--sweep {option}: no setting {key!r} is swept; {nearest(key, fields)}")
    return fields[key], _parsed(SweepConfig, fields[key], text)


def _fields(config: type, names: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the fields that were set on the command line."""
    return {name: _parsed(config, name, values[name]) for name in names if values[name] is not None}


def _parsed(config: type, field: str, value: Any) -> Any:
    """Return the value of a field; parse the text of a field that has several values, such as "1,2"."""
    return yaml.safe_load(f"[{value}]") if get_origin(options.field_type(config, field)) is tuple else value


def _identity(command: str, config: dict[str, Any], inputs: Mapping[str, Manifest]) -> Identity:
    """Return the evaluation's identity; its name ends in the first digits of its fingerprint.

    Plugins of the model are added to `config` itself.
    """
    model = inputs["model"]
    config |= {PLUGINS: model.config[PLUGINS]} if PLUGINS in model.config else {}
    code = job_digest(job_code("evaluate", config, model.config.get("model")))
    upstream = {role: manifest.fingerprint for role, manifest in inputs.items()}
    identity = Identity("evaluate", f"{model.name}/{command}", config, code, upstream)
    return replace(identity, name=f"{identity.name}-{identity.fingerprint[:SHOWN_DIGITS]}")


def _packaged(model: Path) -> Path:
    """Return the folder of the package's model called `model`, or `model` if it exists or there is no such model."""
    folder = trained_models() / model.name
    is_name = model.name == str(model) and not model.exists()
    return folder if is_name and (folder / CONFIG_FILE).is_file() else model


def _own_test_sets(model: Path, kind: str, lengths: Collection[int] | None) -> list[Path]:
    """Return the run directories of the test sets on which the model's experiment evaluates it; make missing ones.

    `lengths`: the lengths to use; None or empty means the shortest one. The result is empty if no known experiment
    trained the model, or if it has none of these lengths. Raises: UserError for the experiment; all exceptions of the
    data jobs.
    """
    found = _run_of(model)
    if found is None:
        return []
    plan, run = found
    of_run = [it for it in plan.nodes.values() if it.config.get("kind") == kind and it.upstream.get("model") == run]
    keys = {key for node in of_run for key in node.upstream.values()}
    nodes = [node for key, node in plan.nodes.items() if key in keys and node.stage == "data"]
    known = sorted({node.config.get("length", 0) for node in nodes})
    wanted = [node for node in nodes if node.config.get("length", 0) in (lengths or known[:1])]
    for node in wanted:
        _make(plan, node)
    if len(known) > 1 and not lengths:
        typer.echo(f"test set {wanted[0].name}; for others, --lengths {','.join(map(str, known))}", err=True)
    return [plan.run_dir(node) for node in wanted]


def _run_of(model: Path) -> tuple[Plan, str] | None:
    """Return the plan of the experiment that trained the model and the key of the phase; None if none is known."""
    about = read_object(_packaged(model) / ABOUT)
    parts = model.resolve().parts
    if about:
        name, run, results = about["experiment"], about["run"], ROOT.parent
    elif "train" in parts and (model / MANIFEST).is_file():
        at = len(parts) - 1 - parts[::-1].index("train")
        name, run, results = parts[at - 1], "/".join(parts[at:]), Path(*parts[: at - 1])
    else:
        return None
    file = options.experiments(results).get(name)
    return None if file is None else (Plan(load_experiment(experiment_path(file)), results), run)


def _make(plan: Plan, node: Node) -> None:
    """Make a data set and its inputs, unless the run directory already shows the wanted result."""
    for key in node.upstream.values():
        _make(plan, plan.nodes[key])
    if not is_result_shown(plan.run_dir(node), Path(plan.work[node.key])):
        typer.echo(f"making {node.key}", err=True)
        run_job(plan.run_dir(node), plan.identity_text(node), None, {})


def _test_sets(command: str, kind: EvaluationKind, folders: list[Path]) -> dict[str, tuple[Path, Manifest]]:
    """Return folder and manifest of each data set by role: its name, or TOKENIZER for tokenizers. Raises: UserError."""
    kinds = " or ".join(kind.reads)
    if not folders and kind.reads != (TOKENIZER,):
        raise OptionError(f"--data: is missing; add the run directory of a data set of kind {kinds}")
    found: dict[str, tuple[Path, Manifest]] = {}
    for given in folders:
        folder = _of_released_words(given) if given.is_file() else given
        data = Manifest.read(folder / MANIFEST)
        found_kind = data.config.get("kind")
        if data.stage != "data" or found_kind not in kind.reads:
            raise OptionError(
                f"--data {folder}: is of kind {found_kind or data.stage}, and {command} reads {kinds}; give the run "
                "directory of such a data set"
            )
        role = TOKENIZER if found_kind == TOKENIZER else data.name
        if role in found:
            raise OptionError(f"--data {folder}: a data set called {role} is given already; remove one")
        found[role] = folder, data
    return found


def _of_released_words(path: Path) -> Path:
    """Convert a file of the authors' generator into a data set, if this was not done yet; return the run directory.

    Raises: OptionError if the file name has another form or another group than the tokens; all exceptions of the job.
    """
    from implicit_llm_data.released_words import read_words

    match = re.fullmatch(r"(train|test)_(\w+)_L(\d+)_P(\d{3})\.bin", path.name)
    if match is None:
        raise OptionError(
            f"--data {path}: has no name such as test_A5_L256_P050.bin, which says group, length and percent of "
            "identities; rename it, or give a run directory"
        )
    split, group, length, percent = match.groups()
    inputs_NL, _, vocab_size = read_words(path)
    monoids = [name for name in MONOID_ORDERS if product_order(group, name) == vocab_size]
    if not monoids:
        raise OptionError(f"--data {path}: its {vocab_size} tokens are those of no product with {group}; rename it")
    given = {
        "group": group,
        "monoid": monoids[0],
        "hard_fraction": round(1 - int(percent) / 100, 2),
        "length": int(length),
        "num_samples": len(inputs_NL),
        "split": split,
        "seed": 0,
        "shard_samples": RELEASED_SHARD,
        "file": str(path.resolve()),
        "sha256": FileDigests(ROOT / ".digests.json")(path),
    }
    return _made("data", path.stem, as_config(fill(WordProblemConfig, given, f"--data {path}")), None, {})


def _model(folder: Path, digests: list[str], log: Path | None) -> tuple[Path, Manifest]:
    """Return the run directory and manifest of a model; import a foreign checkpoint first. Raises: UserError."""
    if (folder / MANIFEST).is_file():
        run = Manifest.read(folder / MANIFEST)
        if run.stage not in ("train", "checkpoint"):
            raise OptionError(
                f"--model {folder}: is the run directory of {run.stage}/{run.name}, which has no model; give that of a "
                "training phase or of an imported checkpoint"
            )
        return folder, run
    if not (folder / CONFIG_FILE).is_file():
        raise OptionError(
            f"--model {folder}: has neither {MANIFEST} nor {CONFIG_FILE}; give the run directory of a training phase, "
            "or the folder of a checkpoint"
        )
    path = folder.resolve()
    config = {
        "path": str(path),
        "sha256": safe_digests(path, FileDigests(ROOT / ".digests.json")) | dict(map(_digest, digests)),
    }
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip(".-") or "checkpoint"
    run_dir = _made("checkpoint", name, config, log, {"downloads": downloads_folder()})
    return run_dir, Manifest.read(run_dir / MANIFEST)


def _made(stage: str, name: str, config: dict[str, Any], log: Path | None, runtime: dict[str, Any]) -> Path:
    """Run a job without inputs and return its run directory, which is below results/by-hand/."""
    identity = Identity(stage, name, config, job_digest(job_code(stage, config)), {})
    run_job(ROOT / stage / name, identity.to_json(), log, runtime)
    return ROOT / stage / name


def _digest(option: str) -> tuple[str, str]:
    name, _, digest = option.partition("=")
    if not name or not re.fullmatch("[0-9a-f]{64}", digest):
        raise OptionError(f"--sha256 {option}: must have the form FILE=DIGEST, with 64 hexadecimal digits")
    return name, digest


def _show(run_dir: Path, columns: Mapping[str, str]) -> None:
    """Print a table with one row for each record of metrics, and the path of the metrics file."""
    files = (record.path for record in Manifest.read(run_dir / MANIFEST).files)
    path = run_dir / next(file for file in files if file.rpartition("/")[2] == METRICS)
    shown = {"data": "data", "mode": "mode", "length": "length", **columns}
    rows = ([_text(record.get(key)) for key in shown] for record in json.loads(path.read_bytes())["records"])
    options.show(plain_table(*shown.values(), rows=rows, right=columns.values()))
    typer.echo(path)


def _text(value: Any) -> str:
    """Return the text of a table cell; an unknown value is a dash, never a zero."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return value if isinstance(value, str) else number_text(value, 5)


for _name in EVALUATION_KINDS:
    evaluate.command(_name.replace("_", "-"))(make_command(_name))


@evaluate.command("harness", context_settings=HANDED_OVER)
def harness(context: typer.Context) -> None:
    """Run the Language Model Evaluation Harness with this project's models; all arguments are the harness's own.

    `--model hf` and `--model implicit` are the same here: any causal model of Hugging Face, in batches without padding,
    which would change how far an implicit model iterates. Further `--model_args`: `eval_mode`, `eval_max_iter`,
    `eval_tol`, `eval_stop`, `eval_block_len`. `pretrained` and `tokenizer` may be run directories.

    **Example**

        implicit-llm evaluate harness run --help
        implicit-llm evaluate harness --model hf --tasks local_cloze \\
            --include_path workflow/config/lm_eval/local \\
            --model_args eval_mode=sequential \\
            tokenizer=results/miniature/data/text-tokenizer \\
            pretrained=results/miniature/train/text-mamba2-implicit-s0/free-80
    """
    from implicit_llm.evaluation.lm_eval_harness import main

    main(context.args)
