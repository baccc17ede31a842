"""Where a model and its tokenizer lie: folders, files, names on the hub, or run directories of this project."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from implicit_llm.evaluation.frame import model_directory
from implicit_llm_contracts.runs import MANIFEST, Input, Manifest, UserError

TOKENIZER_FILE = "tokenizer.json"
OWN_CONFIG = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"


class TokenizerMissing(UserError):
    """There is no tokenizer where one was looked for, or it does not say which token ends a text."""


def model_folder(path: Path) -> Path:
    """The folder of a model: of a training phase's run directory the one that it names, else `path` as it is."""
    if not (path / MANIFEST).is_file():
        return path
    return model_directory(Input(path, Manifest.read(path / MANIFEST)))


def load_tokenizer(given: str | Path | None, model: str | Path) -> Any:
    """The tokenizer `given`, or that of the model: Hugging Face's class around a tokenizer.json, or the model's own.

    `given` is a run directory, a folder, a file or a name on the hub. Raises: TokenizerMissing.
    """
    path = Path(given or model)
    if (path / MANIFEST).is_file():
        return run_tokenizer(Input(path, Manifest.read(path / MANIFEST)))
    if path.is_file():
        return _from_file(path, END_OF_TEXT)
    if (path / TOKENIZER_FILE).is_file() and not (path / OWN_CONFIG).is_file():
        return _from_file(path / TOKENIZER_FILE, END_OF_TEXT)
    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else str(given or model))
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerMissing(
            f"{path}: no tokenizer there; name one, for a model trained here the run directory of its data set's "
            "tokenizer, such as results/miniature/data/text-tokenizer: with `evaluate lm-eval` as --data DIR, with "
            "`lm-eval` as tokenizer=DIR in --model_args"
        ) from error


def run_tokenizer(run: Input) -> Any:
    """The tokenizer that a data job made. Raises: TokenizerMissing."""
    path = run.work / TOKENIZER_FILE
    if not path.is_file():
        raise TokenizerMissing(f"{path}: is not there; give the run directory of a data set's tokenizer")
    return _from_file(path, run.manifest.summary.get("end_of_text_id"))


def _from_file(path: Path, end_of_text: str | int | None) -> Any:
    """`end_of_text`: the token that ends a text, or its id."""
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise TokenizerMissing(f"{path}: is no tokenizer that `tokenizers` reads ({error}); give another") from error
    token: Any = tokenizer.convert_ids_to_tokens(end_of_text) if isinstance(end_of_text, int) else end_of_text
    if token is None or token not in tokenizer.get_vocab():
        raise TokenizerMissing(
            f"{path}: has no token {token or END_OF_TEXT}, which stands before a text without context; add a "
            f"{OWN_CONFIG} that names its eos_token"
        )
    tokenizer.eos_token = token
    return tokenizer
