"""A wrong key or value gives one line: the file, the key, what to do."""

import re
from pathlib import Path

import pytest

from implicit_llm_contracts.runs.places import DEFAULT_DOWNLOADS
from implicit_llm_contracts.runs.run_directory import WORK
from implicit_llm_workflow.commands import evaluate
from implicit_llm_workflow.experiment_files.experiment import RESERVED
from implicit_llm_workflow.planning.graph import build_graph
from tests.refusals import refused
from tests.unit.workflow.experiments import EXCERPTS, GRID, LANGUAGE, TINY, ExperimentFile

LONG = "a" * 300
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY_CASES = [
    ("lengths: [8, 16]", "lenghts: [8, 16]", "data.s3.test: unknown key 'lenghts'; did you mean 'lengths'?"),
    ("name: tiny", "name: Tiny", "name: 'Tiny' is not allowed; give lower-case letters"),
    ("name: tiny", 'name: "tiny\\n"', r"name: 'tiny\n' is not allowed; give lower-case letters"),
    ("name: tiny", "name: downloads", "name: 'downloads' is not allowed; give another name than benchmarks, by-hand, "),
    (
        "  word-problem:\n",
        f"  {WORK}:\n",
        "evaluations: 'work' is not allowed; give another name, because a job works in",
    ),
    ("  implicit:\n", f"  {WORK}:\n", "runs: 'work' is not allowed; give another name"),
    ("  implicit:\n", '  "implicit\\n":\n', r"runs: 'implicit\n' is not allowed; give lower-case letters"),
    ("name: tiny", "nam: tiny", "unknown key 'nam'; did you mean 'name'?"),
    ("  implicit:\n", f"  {LONG}:\n", "is not allowed; give lower-case letters, digits, hyphens and dots,"),
    ("tol: 0.1", "tol: .inf", "override.curriculum.free.solver.tol: inf is not allowed; give a finite number"),
    ("tol: 0.1", "tol: 1e999", "solver.tol: inf is not allowed; give a finite number"),
    ("seeds: [0, 1]", "seeds: [0, .nan]", "seeds[1]: nan is not allowed; give a finite number"),
    ("num_samples: 64", "num_samples: 1e15", "train.num_samples: expected an integer, found 1000000000000000.0"),
    ("group: S3", "group: Q3", "data.s3.group: 'Q3' is no group, built in or of a plugin; use one of S1 to S7"),
    ("group: S3", "group: S9", "data.s3.group: 'S9' is no group"),
    ("group: S3", "group: S7\n    monoid: aperiodic", "data.s3.group: S7 x aperiodic has 20160 elements"),
    ("group: S3", "group: 3", "data.s3.group: expected a string, found 3"),
    ("[0.5, 1]", "1.5", "data.s3.train.hard_fraction: expected a number from 0 to 1 or a list with"),
    ("[0.5, 1]", "[0.5, -1]", "data.s3.train.hard_fraction[1]: -1 is not allowed; give a number from 0 to 1"),
    ("[0.5, 1]", "[]", "data.s3.train.hard_fraction: [] is not allowed; give a list with at least one"),
    ("length: 8", "length: 0", "data.s3.train.length: 0 is not allowed; give an integer from 1 to 65536"),
    ("length: 8", "length: 8.5", "data.s3.train.length: expected an integer, found 8.5"),
    ("length: 8, ", "", "data.s3.train: the key 'length' is missing"),
    ("kind: word_problem\n    group", "kind: words\n    group", "data.s3.kind: there is no 'words'; valid: catbabi"),
    (
        "kind: word_problem\n    group",
        "kind: [words]\n    group",
        "data.s3.kind: there is no ['words']; valid: catbabi",
    ),
    ("kind: word_problem\n    modes", "kind: {a: 1}\n    modes", "evaluations.word-problem.kind: there is no {'a': 1}"),
    (
        "length: 8",
        "length: 010",
        "own.yaml:7: is not valid YAML: 010 would not be read as a decimal number; write that",
    ),
    ("batch_size: 8", "batch_size: 1:30", "1:30 would not be read as a decimal number; write that, or quote it"),
    ("length: 8", "length: 2026-01-01", "data.s3.train.length: 2026-01-01 is read as a date; quote it if it is a text"),
    ("group: S3", 'group: "S\\n3"', r"data.s3.group: 'S\n3' is no group"),
    ("length: 8", 'length: "8\\n"', r"data.s3.train.length: expected an integer, found the text '8\n'"),
    ("mamba2-implicit", LONG, "runs.implicit.model: there is no models/aaa"),
    ("task: word-problem", f"task: {LONG}", "runs.implicit.task: there is no tasks/aaa"),
    ("hidden_size: 16", "hidden_size: null", "model.hidden_size: None is not allowed; give an integer of at least 1"),
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
    ("batch_size: 8", "batch_size: 0", "override.task.batch_size: 0 is not allowed; give an integer from 1 to 1048576"),
    ("batch_size: 8", f"batch_size: {10**23}", f"override.task.batch_size: {10**23} is not allowed; give an integer"),
    ("batch_size: 8", "batch_size: 1e7", "override.task.batch_size: expected an integer"),
    (
        "total_steps: 10,",
        f"total_steps: {10**10},",
        f"override.task.total_steps: {10**10} is not allowed; give an integer",
    ),
    (
        "num_samples: 64",
        "num_samples: 7",
        "runs.implicit.data: 's3' has 7 training sequences, fewer than batch_size, 8, so a batch would repeat some; "
        "give more, or a smaller batch_size in override.task",
    ),
    ("num_samples: 64", f"num_samples: {10**23}", f"train.num_samples: {10**23} is not allowed; give an integer"),
    ("tol: 0.1", f"max_iter: {10**7}", f"solver.max_iter: {10**7} is not allowed; give an integer from 1 to 1000000"),
    ("hidden_size: 16", "hidden_size: 1e23", "model.hidden_size: 1e+23 is not allowed; give an integer below"),
    ("hidden_size: 16", "hidden_size: 0", "model.hidden_size: 0 is not allowed; give an integer of at least 1"),
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
    ("unrolled: {steps: 4}", "unrolled: {steps: rest}", "curriculum.free.steps: the phase would be steps 10 to 10"),
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
    ("steps: 4}", "steps: 10}", "runs.implicit.curriculum.free.steps: the phase would be steps 10 to 10"),
    ("steps: 4}", "steps: most}", "override.curriculum.unrolled.steps: 'most' is not allowed; give a number of steps"),
    ("free: {solver", "fre: {solver", "runs.implicit.override.curriculum: unknown key 'fre'; did you mean 'free'?"),
    (
        "tol: 0.1",
        "tol: 1.5",
        "runs.implicit.override.curriculum.free.solver.tol: 1.5 is not allowed; give a number above 0 and below 1",
    ),
    (
        "tol: 0.1",
        "num_unroll: 2",
        "runs.implicit.override.curriculum.free.solver.num_unroll: does nothing in the mode fixed_point; remove it",
    ),
    (
        "steps: 4}",
        "steps: 4, solver: {stop: token}}",
        "override.curriculum.unrolled.solver.stop: does nothing in the mode unrolled; remove it",
    ),
    (
        "eval_block_len: 4}",
        "eval_block_len: 4}\n      - {name: other, eval_mode: sequential, eval_block_len: 8}",
        "word-problem.modes[1].eval_block_len: does nothing in the mode sequential; remove it, or set eval_mode to",
    ),
    (
        "kind: word_problem\n    modes:",
        "kind: word_problem\n    lengths: []\n    modes:",
        "word-problem.lengths: [] is not allowed; give a list with at least one entry",
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
    ("name: blockwise", "name: ''", "modes[0].name: '' is not allowed; give letters, digits"),
    ("name: blockwise", 'name: "a\\nb"', r"modes[0].name: 'a\nb' is not allowed; give letters"),
    ("name: blockwise", f"name: {LONG}", "is not allowed; give letters, digits, spaces, dots, hyphens"),
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
TINY_CASES += [
    (
        "num_samples: 32}",
        "num_samples: 32}\n    validation: {lengths: [8], hard_fractions: [1], num_samples: 8, seed: 0}",
        "data.s3.validation: its seed 0 is that of the test sets too; give another",
    ),
    (
        "    kind: word_problem\n    modes",
        "    kind: word_problem\n    split: validation\n    modes",
        "evaluations.word-problem.split: data.s3, which implicit was trained on, has no validation sets; add its key",
    ),
    (
        "    kind: word_problem\n    modes",
        "    kind: word_problem\n    split: valid\n    modes",
        "evaluations.word-problem.split: the text 'valid' is not one of",
    ),
    (
        "evaluations:\n",
        "evaluations:\n  jacobian: {kind: jacobian, split: validation}\n",
        "evaluations.jacobian.split: only evaluations of kind word_problem or perplexity read validation; remove",
    ),
]
_BLOCKS = "      - {name: blockwise, eval_mode: blockwise, eval_block_len: 4}\n"
_OTHER = f"{_BLOCKS}  other:\n    kind: word_problem\n    modes: [{{name: blockwise, eval_mode: blockwise}}]\n"
_SAME = "evaluations.other.lengths: word-problem gives the same numbers of "
TINY_CASES += [
    (
        "word_problem\n    modes",
        "word_problem\n    runs: [s5-*]\n    modes",
        "evaluations.word-problem: no run called s5-* has word_problem data",
    ),
    ("    modes:\n" + _BLOCKS, "", "evaluations.word-problem: the key 'modes' is missing"),
    ("word_problem\n    modes", "jacobian\n    modes", "unknown key 'modes'"),
    (
        _BLOCKS,
        f"{_OTHER}    sweep: {{eval_max_iter: [1, 4]}}\n    runs: [explicit]\n",
        "evaluations.other: no implicit run called explicit has word_problem data",
    ),
    (_BLOCKS, f"{_OTHER}    lengths: [16]\n", f"{_SAME}implicit"),
    (
        _BLOCKS,  # explicit models have one way to be evaluated
        f"{_OTHER.replace('name: blockwise, eval_mode: blockwise}', 'name: blocks, eval_mode: blockwise}')}",
        f"{_SAME}explicit; let them have different lengths",
    ),
]
LANGUAGE_CASES = [
    (
        "protocols: [windowed, carried]",
        "carried_max_tokens: 200",
        "questions.carried_max_tokens: does nothing without the protocol carried; add it to protocols, or remove",
    ),
    ("trace_tokens: 64", "lengths: [32, 32]", "agreement.lengths: [32, 32] is not allowed; give a list with at least"),
    ("train: {length: 32}", "train: {length: 32, tokens: 3200}", "runs.trunk.data: 'text' has 100 training sequences"),
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
    (
        "train: {length: 32}",
        "train: {length: 32, tokens: 650}",
        "data.text.train.tokens: 650 is not a multiple of length, 32; give 640",
    ),
    (
        "test_fraction: 0.1\n",
        "test_fraction: 0.1\n    validation: {lengths: [32], fraction: 0.9}\n",
        "data.text.validation: fraction 0.9 and test_fraction 0.1 leave no text for training; give smaller ones",
    ),
    (
        "    kind: perplexity\n",
        "    kind: perplexity\n    split: validation\n",
        "evaluations.perplexity.split: data.text, which trunk was trained on, has no validation sets; add its key",
    ),
    ("num_shards: 3", "num_shards: 0", "data.text.num_shards: 0 is not allowed; give an integer from 1 to 100000"),
    ("task: catbabi", "task: language-model", "runs.babi.task: is for language_model data, data set 'babi' is catbabi"),
    (
        "{total_steps: 1000}",
        "{labels: aligned, total_steps: 1000}",
        "labels: task language_model has labels 'next_token'",
    ),
    (
        "[windowed, carried]",
        "[windowed, carry]",
        "evaluations.questions.protocols[1]: the text 'carry' is not one of windowed",
    ),
    ("kind: duality", "kind: perplexity", "evaluations.agreement: unknown key 'trace_tokens'"),
    ("kind: perplexity", "kind: word_problem", "evaluations.perplexity: unknown key 'max_tokens'"),
    (
        "kind: catbabi\n    protocols: [windowed, carried]\n    modes",
        "kind: word_problem\n    modes",
        "evaluations.questions: no run called * has word_problem data",
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
DOWNSTREAM_CASES = [
    (
        "tasks: paper",
        "num_fewshot: 0",
        "downstream.tasks: give a list of tasks, or the name of a suite; valid: local, paper",
    ),
    (
        "tasks: paper",
        "tasks: papre",
        "downstream.tasks: give a list of tasks, or the name of a suite; did you mean 'paper'?",
    ),
    (
        "tasks: paper",
        "tasks: local, task_path: locl",
        "downstream.task_path: there is no folder 'locl'; did you mean 'local'?",
    ),
    ("tasks: paper", "tasks: []", "downstream.tasks: [] is not allowed"),
    ("tasks: paper", "tasks: paper, max_tokens: 3", "downstream: unknown key 'max_tokens'"),
]
GRID_CASES = [
    ("override.task.batch_size", "overide.task.batch_size", "runs.babi-lr0.0001-batch128: unknown key 'overide'"),
    ("override.task.batch_size", "override", "runs.babi-lr0.0001-batch128.override: expected a mapping"),
    ("override.task.batch_size", "model.hidden_size", "grid.batch.key: 'model' is 'mamba2-babi-explicit' and"),
    (
        "override.task.batch_size",
        "override.task.batch",
        "unknown key 'batch'; did you mean 'batch_size'? (runs.babi.grid",
    ),
    ("override.task.batch_size", "override.task.schedule.peak_learning_rate", "grid.lr.key: two axes change"),
    (
        "[128, 256]",
        "[128, 0]",
        "0 is not allowed; give an integer from 1 to 1048576 (runs.babi.grid: lr = 0.0001, batch = 0)",
    ),
    ("[128, 256]", "[128, 128]", "runs.babi.grid.batch.values: [128, 128] is not allowed"),
    ("[128, 256]", "[a/b]", "runs.babi-lr0.0001-batcha/b.name: 'babi-lr0.0001-batcha/b' is not allowed"),
    ("[128, 256]", "[]", "runs.babi.grid.batch.values: [] is not allowed"),
    ("values: [128", "value: [128", "runs.babi.grid.batch: unknown key 'value'; did you mean 'values'?"),
    ("  flat:", "  babi-lr0.0001-batch128:", "runs: two runs are called 'babi-lr0.0001-batch128'"),
    (
        "batch_size, values: [128, 256]}\n",
        "batch_size.x, values: [1, 2]}\n    override: {task: {batch_size: 4}}\n",
        "grid.batch.key: 'batch_size' is 4 and has no keys below it",
    ),
]
EXCERPT_CASES = [
    (
        "runs: [implicit]",
        "runs: [implicid]",
        "excerpts.figure_3.from[0].runs: no run or peer is called 'implicid'; did you mean 'implicit'",
    ),
    (
        '"word-*"',
        "word-problems",
        "excerpts.figure_3.from[0].evaluations: none of these runs has one called 'word-problems'; did you mean",
    ),
    (
        "[accuracy-by-length]",
        "[accuracy-by-lenght]",
        "excerpts.figure_3.figures: unknown key 'accuracy-by-lenght'; did you mean 'accuracy-by-length'",
    ),
    ("[accuracy]", "[perplexity]", "excerpts.figure_3.tables: unknown key 'perplexity'"),
    ("  figure_3:", "  figure-3:", "excerpts: 'figure-3' is not allowed; give figure_ or table_ with lower-case"),
]
PEER = "{data: text, checkpoint: {path: x}}"
PEER_CASES = [
    (PEER, "{data: text, checkpoint: {}}", "needs either path"),
    (PEER, "{data: text, checkpoint: {path: x, hub: y, revision: null}}", "needs either path"),
    (PEER, "{data: text, checkpoint: {hub: owner/other}}", "and revision (a commit, or null for the newest"),
    (PEER, "{data: text, checkpoint: {path: x, revision: y}}", "needs either path"),
    (PEER, "{data: txt, checkpoint: {path: x}}", "did you mean 'text'"),
    (PEER, "{data: text, checkpoint: {path: x}, evaluations: [perplexty]}", "did you mean 'perplexity'"),
    (PEER, "{data: text, checkpoint: {path: x}, evaluations: [questions]}", "none fits its language_model data"),
    (
        PEER,
        "{data: text, checkpoint: {path: x, sha256: {a.bin: 12}}}",
        "peers.other.checkpoint.sha256.a.bin: expected a string, found 12",
    ),
    ("other: {data", "flat-s0: {data", "peers.flat-s0: is also the name of a trained model"),
]
DOWNSTREAM = (
    "evaluations:\n  downstream: {kind: lm_eval, tasks: paper, modes: [{name: blockwise, eval_mode: blockwise}]}\n"
)
TABLES = [
    (TINY, TINY_CASES),
    (TINY + EXCERPTS, EXCERPT_CASES),
    (LANGUAGE, LANGUAGE_CASES),
    (LANGUAGE.replace("evaluations:\n", DOWNSTREAM), DOWNSTREAM_CASES),
    (LANGUAGE.replace("    task: catbabi\n", f"    task: catbabi\n{GRID}"), GRID_CASES),
    (f"{LANGUAGE}\npeers:\n  other: {PEER}\n", PEER_CASES),
]


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        pytest.param(text, *case, id=f"{case[1]}: {case[2]}".replace(LONG, "LONG"))
        for text, cases in TABLES
        for case in cases
    ],
)
def test_a_mistake_is_named_in_one_line_with_its_file_and_key(
    tmp_path: Path, text: str, old: str, new: str, message: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with refused(re.escape(message)) as caught:
        build_graph(ExperimentFile(path).edit(old, new).load())
    assert str(path) in str(caught.value) or str(caught.value).startswith("own.yaml: ")
    assert caught.value.exit_code == 2


HUB = "pretrained: some/model\nrevision: "
A_COMMIT = "revision: expected a commit in 40 lower-case"
BESIDE_CASES = [
    ("curricula/explicit.yaml", "phases: [{steps: rest}]", r"phases\[0\]: the key 'name' is missing; add it"),
    (
        "curricula/explicit.yaml",
        "phases: [{name: work, steps: rest, solver: null}]",
        r"phases\[0\].name: 'work' is not allowed; give another name",
    ),
    (
        "curricula/explicit.yaml",
        "phases: [{name: explicit, steps: rest, solver: null, after: ''}]",
        r"phases\[0\].after: expected a text that is not empty or null, found the text ''",
    ),
    (
        "tasks/language-model.yaml",
        "task: language_model\nlabels: shifted",
        "labels: the text 'shifted' is not one of aligned",
    ),
    *(
        ("models/llama3-130m-explicit.yaml", text, message)
        for text, message in (
            (f"config: {LONG}", "the library has no configuration 'aaa"),
            ("config: llama3-130m-explicid", "did you mean 'llama3-130m-explicit'"),
            ("config: {model_type: implicit_llama3, hiden_size: 8}", "config: unknown key 'hiden_size'; did you mean"),
            ("config: {model_type: implicit_mamba2, expand: 2}", "config: the key 'is_implicit' is missing; add it"),
            ("config: {model_type: other}\npackage: 'other; rm'", "package: .*name of a Python package"),
            (
                "pretrained: some/model",
                "revision: some/model is no folder; .*`git ls-remote https://huggingface.co/some/model HEAD`",
            ),
            (f"{HUB}main", A_COMMIT),
            (f"{HUB}{COMMIT[:12]}", A_COMMIT),
            (f"{HUB}{COMMIT.upper()}", A_COMMIT),
            (f"{HUB}null", "revision: some/model is no folder"),
            (
                f"pretrained: models\nrevision: {COMMIT}",
                "revision: models is a folder, which has no revision; remove the key",
            ),
            ("pretrained: some/model\nconfig: llama3-130m-explicit", "unknown key"),
            (f"revision: {COMMIT}\nconfig: llama3-130m-explicit", "unknown key"),
        )
    ),
]


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [("gpt2", "n_layer", -1), ("llama", "num_hidden_layers", 0), ("llama", "hidden_size", -64), ("x", "n_head", 0)],
)
def test_a_model_of_hugging_face_needs_sizes_of_at_least_one(
    tiny: ExperimentFile, model_type: str, key: str, value: int
) -> None:
    tiny.edit("model: mamba2-explicit", "model: other")
    tiny.beside("models/other.yaml", f"config: {{model_type: {model_type}, sliding_window: 0, {key}: {value}}}\n")
    with refused(re.escape(f"runs.explicit.model.{key}: {value} is not allowed; give an integer of at least 1")):
        tiny.load()


@pytest.mark.parametrize(("file", "text", "message"), BESIDE_CASES)
def test_a_mistake_in_a_file_beside_the_experiment_is_named_with_that_file(
    language: ExperimentFile, monkeypatch: pytest.MonkeyPatch, file: str, text: str, message: str
) -> None:
    language.beside(file, text)
    monkeypatch.chdir(language.path.parent)
    with refused(f"{file}: .*{message}"):
        language.load()


def test_the_folders_of_results_that_are_no_experiments_are_reserved() -> None:
    assert {evaluate.ROOT.name, DEFAULT_DOWNLOADS.name} < set(RESERVED)
