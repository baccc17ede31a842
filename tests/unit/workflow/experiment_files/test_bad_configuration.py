"""A wrong key or value gives one line: the file, the key, what to do."""

import re

import pytest

from implicit_llm_contracts.runs.errors import ConfigError, UserError
from tests.unit.workflow.experiments import ExperimentFile

CASES = [
    ("lengths: [8, 16]", "lenghts: [8, 16]", "data.s3.test: unknown key 'lenghts'; did you mean 'lengths'?"),
    ("name: tiny", "name: Tiny", "name: 'Tiny' is not allowed; give lower-case letters"),
    ("name: tiny", 'name: "tiny\\n"', r"name: 'tiny\n' is not allowed; give lower-case letters"),
    ("  implicit:\n", '  "implicit\\n":\n', r"runs: 'implicit\n' is not allowed; give lower-case letters"),
    ("name: tiny", "nam: tiny", "unknown key 'nam'; did you mean 'name'?"),
    ("group: S3", "group: Q3", "data.s3.group: 'Q3' is no group, built in or of a plugin; use one of S1 to S7"),
    ("group: S3", "group: S9", "data.s3.group: 'S9' is too large"),
    ("group: S3", "group: S7\n    monoid: aperiodic", "data.s3.group: S7 x aperiodic has 20160 elements"),
    ("group: S3", "group: 3", "data.s3.group: expected a string, found 3"),
    ("[0.5, 1]", "1.5", "data.s3.train.hard_fraction: expected a number from 0 to 1 or a list with"),
    ("[0.5, 1]", "[0.5, -1]", "data.s3.train.hard_fraction[1]: -1 is not allowed; give a number from 0 to 1"),
    ("[0.5, 1]", "[]", "data.s3.train.hard_fraction: [] is not allowed; give a list with at least one"),
    ("length: 8", "length: 0", "data.s3.train.length: 0 is not allowed; give an integer from 1 to 65536"),
    ("length: 8", "length: 8.5", "data.s3.train.length: expected an integer, found 8.5"),
    ("length: 8, ", "", "data.s3.train: the key 'length' is missing"),
    ("kind: word_problem\n    group", "kind: words\n    group", "data.s3.kind: there is no 'words'; valid: catbabi"),
    ("data: s3", "data: s33", "runs.implicit.data: no data set 's33' in this file; did you mean 's3'?"),
    ("task: word-problem", "task: word-problems", "runs.implicit.task: there is no tasks/word-problems.yaml; did you"),
    ("mamba2-implicit", "mamba3", "runs.implicit.model: there is no models/mamba3.yaml"),
    ("curriculum: explicit", "curriculum: expl", "runs.explicit.curriculum: there is no curricula/expl.yaml"),
    ("seeds: [0, 1]", "seeds: [0, 0]", "runs.implicit.seeds: [0, 0] is not allowed"),
    (
        "hidden_size",
        "hiden_size",
        "runs.implicit.override.model: unknown key 'hiden_size'; did you mean 'hidden_size'?",
    ),
    ("hidden_size: 16", "hidden_size: big", "runs.implicit.override.model.hidden_size: 'big' has the wrong type"),
    ("hidden_size: 16", "hidden_size: true", "runs.implicit.override.model.hidden_size: True has the wrong type"),
    (
        "hidden_size",
        "vocab_size",
        "runs.implicit.override.model.vocab_size: cannot be overridden; it follows from the data",
    ),
    ("batch_size: 8", "batch: 8", "override.task: unknown key 'batch'; did you mean 'batch_size'?"),
    ("batch_size: 8", "batch_size: 0", "override.task.batch_size: 0 is not allowed; give an integer of at least 1"),
    (
        "batch_size: 8",
        "optimizer: {beta1: 2}",
        "override.task.optimizer.beta1: 2 is not allowed; give a number from 0 to below 1",
    ),
    (
        "batch_size: 8",
        "schedule: {decay_fraction: 0.1}",
        "schedule.decay_fraction: belongs to kind warmup_stable_decay and only to it",
    ),
    (
        "batch_size: 8",
        "schedule: {kind: cosine}",
        "override.task.schedule.kind: the text 'cosine' is not one of",
    ),
    ("unrolled: {steps: 4}", "unrolled: {steps: rest}", "curriculum.free.steps: no step of the 10 is left"),
    (
        "free: {solver: {tol: 0.1}}",
        "free: {steps: 5}",
        "the phases up to 'free' have 9 steps, the task has total_steps",
    ),
    # What a shell would run.
    ("name: tiny", "name: 'tiny;touch x'", "name: 'tiny;touch x' is not allowed"),
    ("  s3:\n", "  's3;touch x':\n", "data: 's3;touch x' is not allowed"),
    ("  implicit:\n", "  'implicit$(touch x)':\n", "runs: 'implicit$(touch x)' is not allowed"),
    ("  word-problem:\n", "  'word`touch x`':\n", "evaluations: 'word`touch x`' is not allowed"),
    ("mamba2-implicit", "'../$(touch x)'", "runs.implicit.model: there is no models/../$(touch x).yaml"),
    (
        "unrolled: {steps: 4}",
        "unroled: {steps: 4}",
        "override.curriculum: unknown key 'unroled'; did you mean 'unrolled'?",
    ),
    (
        "unrolled: {steps: 4}",
        "unrolled: {stps: 4}",
        "override.curriculum.unrolled: unknown key 'stps'; did you mean 'steps'?",
    ),
    ("steps: 4}", "steps: 10}", "runs.implicit.curriculum.free.steps: no step of the 10 is left"),
    ("steps: 4}", "steps: most}", "override.curriculum.unrolled.steps: 'most' is not allowed; give a number of steps"),
    ("free: {solver", "fre: {solver", "runs.implicit.override.curriculum: unknown key 'fre'; did you mean 'free'?"),
    (
        "tol: 0.1",
        "tol: 1.5",
        "runs.implicit.override.curriculum.free.solver.tol: 1.5 is not between 0 and 1",
    ),
    ("tol: 0.1", "toll: 0.1", "runs.implicit.override.curriculum.free.solver: unknown key 'toll'; did you mean 'tol'?"),
    (
        "curriculum: explicit",
        "curriculum: unrolled-then-free",
        "model 'mamba2-explicit' is explicit, so phase 'unrolled'",
    ),
    (
        "curriculum: unrolled-then-free",
        "curriculum: explicit",
        "override.curriculum: unknown key 'unrolled'; valid: explicit",
    ),
    (
        "eval_mode: blockwise",
        "eval_mode: block",
        "modes[0].eval_mode: the text 'block' is not one of",
    ),
    (
        "eval_block_len: 4}",
        "eval_block_len: 4}\n      - {name: blockwise, eval_mode: sequential}",
        "mode name 'blockwise' is taken",
    ),
]
LANGUAGE_CASES = [
    ("kind: catbabi", "kind: catbab", "data.babi.kind: there is no 'catbab'; did you mean 'catbabi'?"),
    ("vocab_size: 192", "vocab_sise: 192", "data.babi: unknown key 'vocab_sise'; did you mean 'vocab_size'?"),
    ("vocab_size: 512", "vocab_size: 70000", "data.text.vocab_size: 70000 is not allowed; give an integer"),
    ("source: simulated", "source: simulation", "data.babi.text.source: the text 'simulation' is not one of simulated"),
    ("source: simulated", "source: archive", "data.babi.text: unknown key 'families'"),
    ("families: [2, 1]", "families: [21]", "data.babi.text.families[0]: 21 is not allowed"),
    ("length: 200", "length: 200\n    collection: en-valid", "data.babi.collection: a text of source simulated has no"),
    ("length: 200", "length: 200\n    mode: ra", "data.babi.mode: the text 'ra' is not one of qa"),
    ("{source: python_library}", "{source: hub}", "data.text.corpus: the key 'dataset' is missing; add it"),
    ("{source: python_library}", "{source: files, files: []}", "data.text.corpus.files: [] is not allowed"),
    (
        "{source: trained}",
        "{source: file, file: t, sha256: 12}",
        "data.text.tokenizer.sha256: expected a sha256 in",
    ),
    (
        "{source: trained}",
        "{source: train}",
        "data.text.tokenizer.source: the text 'train' is not one of file, hub, trained",
    ),
    ("num_shards: 3", "num_shards: 0", "data.text.num_shards: 0 is not allowed; give an integer from 1 to 100000"),
    ("task: catbabi", "task: language-model", "runs.babi.task: is for language_model data, data set 'babi' is catbabi"),
    (
        "{total_steps: 1000}",
        "{labels: aligned, total_steps: 1000}",
        "labels: kind language_model has labels 'next_token'",
    ),
    (
        "[windowed, carried]",
        "[windowed, carry]",
        "evaluations.questions.protocols[1]: the text 'carry' is not one of windowed",
    ),
    ("kind: duality", "kind: perplexity", "evaluations.agreement.trace_tokens: belongs to kind duality"),
    ("kind: perplexity", "kind: word_problem", "evaluations.perplexity.max_tokens: belongs to kind perplexity"),
    (
        "kind: catbabi\n    protocols: [windowed, carried]\n    modes",
        "kind: word_problem\n    modes",
        "evaluations.questions.kind: no run has word_problem",
    ),
    ("hidden_size: 64", "hidden_size: 72", "runs.trunk.model.head_dim: 64 does not divide expand * hidden_size = 144"),
    (
        "  flat:\n    data: text\n    model: llama3-130m-explicit\n    task: language-model\n    curriculum: explicit\n"
        "    override:\n",
        "  flat:\n    data: text\n    model: llama3-130m-explicit\n    task: language-model\n    curriculum: explicit\n"
        "    override:\n      model: {hidden_size: 60}\n",
        "runs.flat.model.num_attention_heads: 12 does not divide hidden_size 60 into heads of even width",
    ),
]


def check_refusal(experiment: ExperimentFile, message: str) -> None:
    """It names file and key in one line."""
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        experiment.load()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{experiment.path.name}: ") or str(experiment.path) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("old", "new", "message"), CASES, ids=[case[1] for case in CASES])
def test_a_mistake_is_named_in_one_line_with_its_file_and_key(
    tiny: ExperimentFile, old: str, new: str, message: str
) -> None:
    check_refusal(tiny.edit(old, new), message)


@pytest.mark.parametrize(("old", "new", "message"), LANGUAGE_CASES, ids=[case[2] for case in LANGUAGE_CASES])
def test_a_mistake_about_language_models_is_named_so_too(
    language: ExperimentFile, old: str, new: str, message: str
) -> None:
    check_refusal(language.edit(old, new), message)


def test_a_broken_file_beside_the_experiment_is_named(tiny: ExperimentFile) -> None:
    tiny.beside("tasks/word-problem.yaml", "kind: word_problem\nlabels: shifted\n")
    with pytest.raises(ConfigError, match=r"word-problem.yaml: labels: the text 'shifted' is not one of aligned"):
        tiny.load()


def test_an_unknown_library_configuration_is_named(tiny: ExperimentFile) -> None:
    tiny.beside("models/mamba2-implicit.yaml", "config: mamba2-state-tracking-implicid\n")
    with pytest.raises(ConfigError, match="did you mean 'mamba2-state-tracking-implicit'"):
        tiny.load()
