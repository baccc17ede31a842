"""The command `evaluate`, with a sub-command for each kind of evaluation.

The options of a kind are the fields of its dataclass that the table of kinds describes, and those of a mode; see
`implicit_llm_contracts/config/evaluation_kinds.py`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from implicit_llm_contracts.config.evaluation import PUBLISHED, ModeConfig, SweepConfig
from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, MODE_SETTINGS, EvaluationKind
from implicit_llm_contracts.config.solver import EvalMode
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.commands.evaluate_by_hand import Given, evaluate_by_hand
from implicit_llm_workflow.commands.options import OptionError
from implicit_llm_workflow.experiment_files.evaluations import completed_settings

MODES = (*get_args(EvalMode), PUBLISHED)
KEYWORD = inspect.Parameter.KEYWORD_ONLY
MODES_PANEL = "How an implicit model is solved"
# Everything behind `harness` belongs to it, options that this console knows under the same name included.
HANDED_OVER = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

evaluate = typer.Typer(
    name="evaluate",
    help="Evaluate any model manually: one sub-command for each kind of evaluation.\n\n"
    "The model is a run directory, or a checkpoint of transformers, of the published layout, or of the original "
    "Mamba2 release. The result gets a run directory of its own, so that the same call finds it there. Evaluations of "
    "an experiment are run by Snakemake, each by one call of `implicit-llm job`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Mode = Annotated[
    list[str] | None,
    typer.Option(
        help="blockwise (the default), simultaneous, sequential, as_trained (the training pass), or published: "
        "simultaneous with the published stopping rule. Repeatable. An explicit model is evaluated once, in the mode "
        "`parallel`.",
        metavar="NAME",
        rich_help_panel=MODES_PANEL,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        help="Test-time compute: each mode once for each value, such as max-iter=1,2 or tol=0.2,0.05. Repeatable.",
        metavar="KEY=VALUES",
        rich_help_panel=MODES_PANEL,
    ),
]


def make_command(name: str) -> Callable[..., None]:
    """The function that Typer turns into the sub-command of a kind."""
    kind, command_name = EVALUATION_KINDS[name], name.replace("_", "-")
    hints = dict(_options(kind.config, kind.settings, "Options"))
    if kind.has_modes:
        hints |= {"mode": Mode, **dict(_options(ModeConfig, MODE_SETTINGS, MODES_PANEL)), "sweep": Sweep}
    parameters = [inspect.Parameter(key, KEYWORD, default=None, annotation=hint) for key, hint in hints.items()]
    given_hints = get_type_hints(Given, include_extras=True)
    for key, parameter in inspect.signature(Given).parameters.items():
        parameters.append(parameter.replace(kind=KEYWORD, annotation=given_hints[key]))

    def command(**values: Any) -> None:
        given = Given(**{key: values.pop(key) for key in given_hints})
        evaluate_by_hand(name, _config(name, kind, values), given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    # An option and its value stay on one line.
    example = re.sub(r"(--\S+) (?!--)", "\\1\xa0", f"implicit-llm evaluate {command_name} {kind.example}")
    lines = [line.replace("\xa0", " ") for line in textwrap.wrap(example, 68, break_on_hyphens=False)]
    # Without a paragraph before it Typer takes the indent from an example, and its lines run together.
    about = "It prints the numbers and the path of their file."
    command.__doc__ = f"{kind.summary}\n\n{about}\n\n**Example**\n\n    " + " \\\n        ".join(lines)
    return command


def _options(config: type, sentences: Mapping[str, str], panel: str) -> Iterable[tuple[str, Any]]:
    """Options for the fields of a dataclass that have a sentence; text where Typer does not know the type."""
    for field, text in sentences.items():
        hint = _field_type(config, field)
        is_number, is_tuple = hint in (int, float), get_origin(hint) is tuple
        metavar = "N" if is_number else "A,B" if is_tuple else "NAME"
        option = typer.Option(help=text, metavar=metavar, rich_help_panel=panel)
        yield _option_name(field), Annotated[(hint if is_number else str) | None, option]


def _option_name(field: str) -> str:
    return field.removeprefix("eval_")


def _field_type(config: type, field: str) -> Any:
    """The type of a field, without its None."""
    hint = get_type_hints(config)[field]
    is_optional = get_origin(hint) in (Union, UnionType)
    return next(member for member in get_args(hint) if member is not type(None)) if is_optional else hint


def _config(name: str, kind: EvaluationKind, values: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation as an experiment file has it. Raises: UserError."""
    config: dict[str, Any] = {"kind": name}
    if kind.has_modes:
        config["modes"] = _modes(values, values["mode"] or kind.default_modes)
        sweep = dict(_swept(option) for option in values["sweep"] or ())
        config |= {"sweep": sweep} if sweep else {}
    settings = _fields(kind.config, kind.settings, values)
    return config | dict(completed_settings(name, settings, f"evaluate {name.replace('_', '-')}"))


def _modes(values: Mapping[str, Any], names: Iterable[str]) -> list[dict[str, Any]]:
    """The modes with these names, all with the settings that were given."""
    unknown = next((name for name in names if name not in MODES), None)
    if unknown is not None:
        raise OptionError(f"--mode: there is no mode {unknown!r}; {nearest(unknown, MODES)}")
    shared = _fields(ModeConfig, MODE_SETTINGS, values)
    of_blocks = {key: shared.pop(key) for key in ("eval_block_len",) if key in shared}
    if of_blocks and "blockwise" not in names:
        raise OptionError("--block-len: is for the mode blockwise; add --mode blockwise, or leave it out")
    return [
        {"name": name, "eval_mode": "simultaneous" if name == PUBLISHED else name, **shared}
        | (of_blocks if name == "blockwise" else {})
        for name in names
    ]


def _swept(option: str) -> tuple[str, list[Any]]:
    """("eval_max_iter", [1, 2]) of "max-iter=1,2"."""
    fields = {_option_name(field).replace("_", "-"): field for field in get_type_hints(SweepConfig)}
    key, _, text = option.partition("=")
    if key not in fields:
        raise OptionError(f"--sweep {option}: no setting {key!r} is swept; {nearest(key, fields)}")
    return fields[key], _parsed(SweepConfig, fields[key], text, f"--sweep {option}")


def _fields(config: type, names: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of these fields, by field."""
    given = {name: values[_option_name(name)] for name in names if values[_option_name(name)] is not None}
    return {name: _parsed(config, name, value, f"--{name} {value}") for name, value in given.items()}


def _parsed(config: type, field: str, value: Any, where: str) -> Any:
    """A value of a field; of a field with several values from text. Raises: OptionError."""
    hint = _field_type(config, field)
    if get_origin(hint) is not tuple:
        return value
    member = get_args(hint)[0]
    try:
        return [member(word) if member in (int, float) else word for word in value.split(",") if word]
    except ValueError as error:
        raise OptionError(f"{where}: must be numbers with commas between them, such as 1,2") from error


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
    from implicit_llm.evaluation.lm_eval_harness.command_line import main

    main(context.args)
