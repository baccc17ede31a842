"""How a sub-command of `evaluate` is made: the options that all kinds share, and the settings of its kind."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, EvaluationKind
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.commands.evaluate_by_hand import ByHand, evaluate_by_hand
from implicit_llm_workflow.commands.job import Device, Job, Kernels, Log, OptionError, Threads, run_job
from implicit_llm_workflow.experiment_files.evaluations import completed_settings

# What a mode of this name is solved by; "published" is also the name of a stopping rule, which the job knows.
EVAL_MODES = {
    "blockwise": "blockwise",
    "simultaneous": "simultaneous",
    "sequential": "sequential",
    "published": "simultaneous",
}
STOPS = ("sequence", "token", "batch")
_FIELDS = {"max_iter": "eval_max_iter", "tol": "eval_tol", "stop": "eval_stop", "max_samples": "max_samples"}
_SWEPT = {"max-iter": ("eval_max_iter", int), "tol": ("eval_tol", float)}

JOB, BY_HAND, MODES = "As a job of a workflow", "By hand", "How an implicit model is solved"
JobDir = Annotated[
    Path | None,
    typer.Option(help="Run directory of the job; everything it writes lies there.", metavar="DIR", rich_help_panel=JOB),
]
JobIdentity = Annotated[
    str | None,
    typer.Option(help="What the result depends on, as JSON, or @FILE.", metavar="JSON", rich_help_panel=JOB),
]
JobInputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="Run directory of a finished job this one reads from, by role, or a JSON file of them as @FILE.",
        metavar="ROLE=DIR",
        rich_help_panel=JOB,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="Run directory of a training phase, or any checkpoint: of transformers (config.json and safetensors), in "
        "the published layout, or of the original Mamba2 release.",
        metavar="DIR",
        rich_help_panel=BY_HAND,
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(help="Run directory of a data set. Repeatable.", metavar="DIR", rich_help_panel=BY_HAND),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Run directory of the evaluation; else below results/by-hand/.", metavar="DIR", rich_help_panel=BY_HAND
    ),
]
Sha256 = Annotated[
    list[str] | None,
    typer.Option(
        "--sha256",
        help="Digest that a file of the checkpoint must have. A pytorch_model.bin is read only if it is named here.",
        metavar="FILE=DIGEST",
        rich_help_panel=BY_HAND,
    ),
]
BatchSize = Annotated[int, typer.Option(min=0, help="Sequences at a time; 0 takes the default.", metavar="N")]


def job_options(
    run_dir: JobDir = None,
    identity: JobIdentity = None,
    inputs: JobInputs = None,
    model: Model = None,
    data: Data = None,
    out: Out = None,
    sha256: Sha256 = None,
    log: Log = None,
    threads: Threads = 0,
    device: Device = "auto",
    batch_size: BatchSize = 0,
    kernels: Kernels = "auto",
) -> None:
    """The options of every kind; only the signature counts."""


def mode_options(
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="blockwise (the default), simultaneous, sequential, or published: simultaneous with the published "
            "stopping rule. Repeatable. An explicit model is evaluated once, in the mode `parallel`.",
            metavar="NAME",
            rich_help_panel=MODES,
        ),
    ] = None,
    max_iter: Annotated[
        int,
        typer.Option(
            min=0, help="f-evaluations allowed for one block; 0: as saved.", metavar="N", rich_help_panel=MODES
        ),
    ] = 0,
    tol: Annotated[
        float,
        typer.Option(min=0, max=1, help="Relative residual; 0: as saved.", metavar="RESIDUAL", rich_help_panel=MODES),
    ] = 0.0,
    block_len: Annotated[
        int,
        typer.Option(min=0, help="Tokens of a block, for blockwise; 0: as saved.", metavar="N", rich_help_panel=MODES),
    ] = 0,
    stop: Annotated[
        str,
        typer.Option(
            help="What must be converged before a sequence stops: sequence, token or batch; empty: as saved.",
            metavar="RULE",
            rich_help_panel=MODES,
        ),
    ] = "",
    max_samples: Annotated[
        int,
        typer.Option(
            min=0, help="The first sequences of each data set only; 0: all.", metavar="N", rich_help_panel=MODES
        ),
    ] = 0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Test-time compute: each mode once for each value, such as max-iter=1,2 or tol=0.2,0.05. Repeatable.",
            metavar="KEY=VALUES",
            rich_help_panel=MODES,
        ),
    ] = None,
) -> None:
    """The options of the kinds that have modes; only the signature counts."""


def make_command(name: str) -> Callable[..., None]:
    """The function that Typer makes the sub-command of a kind of."""
    kind, command_name = EVALUATION_KINDS[name], name.replace("_", "-")
    own, modes, job = _settings(kind), _parameters(mode_options) if kind.has_modes else {}, _parameters(job_options)

    def command(**values: Any) -> None:
        given = ({key: values[key] for key in group} for group in (own, modes, job))
        _evaluate(name, *given)

    merged = [*own.values(), *modes.values(), *job.values()]
    command.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
    example = textwrap.wrap(f"implicit-llm evaluate {command_name} {kind.example}", 100, break_on_hyphens=False)
    command.__doc__ = f"{kind.summary}\n\n**Example**\n\n    " + " \\\n        ".join(example)
    command.__name__ = command_name
    return command


def _settings(kind: EvaluationKind) -> dict[str, inspect.Parameter]:
    """The settings of a kind as options, None where one is not given."""
    hints = get_type_hints(kind.config)
    return {name: _option(name, _without_none(hints[name]), text) for name, text in kind.settings.items()}


def _option(name: str, hint: Any, text: str) -> inspect.Parameter:
    is_number = hint in (int, float)
    metavar = "N" if is_number else "A,B" if get_origin(hint) is tuple else "NAME"
    annotation = Annotated[(hint if is_number else str) | None, typer.Option(help=text, metavar=metavar)]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _without_none(hint: Any) -> Any:
    is_optional = get_origin(hint) in (Union, UnionType)
    return next(member for member in get_args(hint) if member is not type(None)) if is_optional else hint


def _parsed(kind: EvaluationKind, own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, as an experiment file has them. Raises: OptionError."""
    hints = get_type_hints(kind.config)
    found: dict[str, Any] = {}
    for name, value in own.items():
        if value is None:
            continue
        hint = _without_none(hints[name])
        if get_origin(hint) is not tuple:
            found[name] = value
            continue
        words = [word for word in value.split(",") if word]
        try:
            found[name] = [int(word) for word in words] if get_args(hint)[0] is int else words
        except ValueError as error:
            raise OptionError(f"--{name} {value}: must be integers, divided by commas") from error
    return found


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Its parameters, for keywords only, with their types resolved."""
    hints = get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
    }


def _evaluate(name: str, own: Mapping[str, Any], modes: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    kind, command = EVALUATION_KINDS[name], name.replace("_", "-")
    runtime = {key: job[key] for key in ("device", "kernels")}
    runtime |= {key: job[key] or None for key in ("threads", "batch_size")}
    if job["model"] is None:
        if job["run_dir"] is None or job["identity"] is None:
            raise OptionError(
                "--model: is missing; add --model DIR and --data DIR to evaluate by hand (a job of a workflow has "
                "--run-dir and --identity instead)"
            )
        run_job(Job("evaluate", job["run_dir"], job["identity"], job["inputs"], job["log"], runtime, name))
        return
    if job["run_dir"] is not None or job["identity"] is not None or job["inputs"]:
        raise OptionError("--model: is for evaluation by hand; leave out --run-dir, --identity and --input")
    config: dict[str, Any] = {"kind": name}
    if kind.has_modes:
        config["modes"] = parse_modes(modes, kind.default_modes)
        sweep = parse_sweep(modes["sweep"] or [])
        config |= {"sweep": sweep} if sweep else {}
    asked = ByHand(
        command=command,
        config={**config, **completed_settings(name, _parsed(kind, own), f"evaluate {command}")},
        kind=kind,
        model=job["model"],
        data=tuple(job["data"] or ()),
        out=job["out"],
        sha256=tuple(job["sha256"] or ()),
        log=job["log"],
        runtime=runtime,
    )
    evaluate_by_hand(asked)


def parse_modes(options: Mapping[str, Any], default: Sequence[str]) -> list[dict[str, Any]]:
    """As an experiment file has them, those of `default` if none is named; the settings given apply to every mode.

    Raises: OptionError.
    """
    names = list(options["mode"] or default)
    for name in names:
        if name not in EVAL_MODES:
            raise OptionError(f"--mode: there is no mode {name!r}; {nearest(name, EVAL_MODES)}")
    if len(set(names)) < len(names):
        raise OptionError(f"--mode: {', '.join(names)} names a mode twice; remove one")
    if options["stop"] and options["stop"] not in STOPS:
        raise OptionError(f"--stop: {options['stop']!r} is no stopping rule; {nearest(options['stop'], STOPS)}")
    if options["block_len"] and "blockwise" not in names:
        raise OptionError("--block-len: is for the mode blockwise; add --mode blockwise, or leave it out")
    shared = {field: options[key] for key, field in _FIELDS.items() if options[key]}
    modes = [{"name": name, "eval_mode": EVAL_MODES[name], **shared} for name in names]
    for mode in modes:
        if options["block_len"] and mode["name"] == "blockwise":
            mode["eval_block_len"] = options["block_len"]
    return modes


def parse_sweep(options: Iterable[str]) -> dict[str, list[Any]]:
    """{"eval_max_iter": [1, 2]} of "max-iter=1,2". Raises: OptionError."""
    found: dict[str, list[Any]] = {}
    for option in options:
        key, _, text = option.partition("=")
        if key not in _SWEPT:
            raise OptionError(f"--sweep {option}: no setting {key!r} is swept; {nearest(key, _SWEPT)}")
        field, kind = _SWEPT[key]
        try:
            found[field] = [kind(word) for word in text.split(",")]
        except ValueError as error:
            raise OptionError(f"--sweep {option}: must have the form {key}=VALUE,VALUE") from error
    return found
