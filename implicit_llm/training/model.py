"""Build the model of a training job from its config."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

import implicit_llm  # noqa: F401  (registers the implicit models with the Auto classes)
from implicit_llm.cuda_graphs.runner import GraphRunner
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.loading import import_package_of, load_foreign, to_implicit
from implicit_llm.models.lstm import LstmForCausalLM
from implicit_llm_contracts.config.solver import SolverConfig, solver_of
from implicit_llm_contracts.config.training import Runtime, TrainConfig
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.fetched_files import fetched_model
from implicit_llm_contracts.runs.manifest import sha256_of
from implicit_llm_contracts.runs.places import downloads_folder, local_folder

SEE = "see the documentation of transformers"


class ModelError(UserError):
    """The model of the config cannot be built, or does not fit the data, the phase or the runtime settings."""


def build_model(config: TrainConfig, vocab_size: int, where: str) -> PreTrainedModel:
    """Return the model in fp32 with the phase's solver.

    The config's seed determines new parameters; the call seeds all random generators of the process with this seed.
    Raises: ModelError, whose message starts with `where`; FetchedFilesError if files of a hub model are missing or
        have another size or revision.
    """
    set_seed(config.seed)
    fields, solver = config.model, config.phase.solver
    try:
        model = _pretrained(fields, solver, where) if "pretrained" in fields else _from_config(fields, solver, where)
    except (ValueError, TypeError, OSError) as error:
        if hasattr(error, "exit_code"):
            raise
        raise ModelError(f"{where}.model: {' '.join(str(error).split())[:300]}") from error
    if solver is not None and solver_of(model) is None:
        raise ModelError(f"{where}.phase.solver: the model is explicit and has none; set solver to null")
    if solver is None and solver_of(model) is not None:
        raise ModelError(f"{where}.phase.solver: the model is implicit and needs one; name its settings, at least mode")
    # State passing needs a model that starts from states of fixed size in a cache and updates these states.
    passes_states = isinstance(model, LstmForCausalLM) or (
        isinstance(model, ImplicitForCausalLM) and not model.base.has_growing_state
    )
    if config.phase.state_passing is not None and not passes_states:
        raise ModelError(
            f"{where}.phase.state_passing: {type(model).__name__} has no state of fixed size in which a sequence could "
            "start; remove the key, or take a Mamba2 or an LSTM"
        )
    if model.config.get_text_config().vocab_size < vocab_size:
        raise ModelError(
            f"{where}.model.vocab_size: {model.config.get_text_config().vocab_size} tokens are fewer than the "
            f"{vocab_size} of the data; {'lower that of the data' if 'pretrained' in fields else 'raise it'}"
        )
    return model


def apply_runtime(model: PreTrainedModel, runtime: Runtime, where: str) -> None:
    """Change `model` in place: apply `cuda_graphs` if it is an ImplicitForCausalLM, and `gradient_checkpointing`.

    Raises: ModelError if `gradient_checkpointing` is set and the model does not support it.
    """
    if isinstance(model, ImplicitForCausalLM):
        model.base.runner = GraphRunner(replays_training=runtime.cuda_graphs)
    if not runtime.gradient_checkpointing:
        return
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{where}: {type(model).__name__} cannot compute its activations again; leave out gradient_checkpointing "
            "and choose a smaller micro_batch_size"
        )
    how = {"use_reentrant": False}  # in torch's reentrant mode, one backward pass may run a gradient hook several times
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:  # before transformers 5.20
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        # The call above may add a hook that only the reentrant mode needs. It would prevent fused products and graphs.
        model.disable_input_require_grads()


def _pretrained(fields: dict[str, Any], solver: SolverConfig | None, where: str) -> PreTrainedModel:
    """Return the model of a folder, or of a hub commit that `prefetch` has fetched; never use the network.

    With a `solver`, an implicit model gets it in place of the saved solver, and an explicit model becomes implicit.
    Raises: ModelError, FetchedFilesError.
    """
    given, revision, downloads = fields["pretrained"], fields.get("revision"), downloads_folder()
    is_local = revision is None
    folder = local_folder(Path(given), downloads) if is_local else fetched_model(given, revision, downloads)[0]
    if folder is None:
        raise ModelError(
            f"{where}.model.pretrained: {given} is no folder; correct it, or add revision, the commit of a model of "
            "the hub in 40 hexadecimal digits"
        )
    for name, sha256 in fields.get("sha256", {}).items():
        path = folder / name
        if not path.is_file() or sha256_of(path) != sha256:
            raise ModelError(
                f"{where}.model.sha256: {path} has changed since this job was planned; plan it again, or bring back "
                "that file"
            )
    try:
        model: Any = load_foreign(folder)
    except ModelConfigError as error:
        raise ModelError(f"{where}.model.pretrained: {folder}: {error}") from error
    if solver is None:
        return model
    if solver_of(model) is not None:
        model.solver = solver
        return model
    try:
        return to_implicit(model, solver)
    except (ModelConfigError, TypeError) as error:
        raise ModelError(
            f"{where}.model.pretrained: cannot become implicit: {error}; or set the solver of its phases to null"
        ) from error


def _from_config(fields: dict[str, Any], solver: SolverConfig | None, where: str) -> PreTrainedModel:
    try:
        import_package_of(fields)
    except ModelConfigError as error:
        raise ModelError(f"{where}.model.package: {error}") from error
    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING:
        hint = nearest(kind, CONFIG_MAPPING, SEE)
        raise ModelError(f"{where}.model.model_type: Hugging Face knows no {kind!r}; {hint}")
    known = CONFIG_MAPPING[kind]()
    for key in fields:
        if key != "package" and not hasattr(known, key):
            hint = nearest(key, known.to_dict(), SEE)
            raise ModelError(f"{where}.model.{key}: {kind} has no such field; {hint}")
    given = {key: value for key, value in fields.items() if key not in ("model_type", "package")}
    if solver is not None:
        given["solver"] = solver
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given), dtype=torch.float32)
