"""An experiment file with CatbAbI and a language model: a trunk with two branches, and its explicit baseline."""

from __future__ import annotations

LANGUAGE = """\
name: language

data:
  babi:
    kind: catbabi
    text:
      source: simulated
      families: [2, 1]
      stories: {train: 8, valid: 4, test: 4}
    length: 200
    vocab_size: 192
  text:
    kind: language_model
    corpus: {source: python_library}
    num_shards: 3
    tokenizer: {source: trained}
    vocab_size: 512
    test_fraction: 0.1
    train: {length: 32}
    test: {lengths: [64, 32]}

runs:
  babi:
    data: babi
    model: mamba2-babi-explicit
    task: catbabi
    curriculum: explicit
  trunk:
    data: text
    model: mamba2-130m-implicit
    task: language-model
    curriculum: bounded-then-free-branches
    seeds: [0, 1]
    override:
      model: {hidden_size: 64}
      task: {total_steps: 1000}
      curriculum:
        free-70: {solver: {tol: 0.04}}
  flat:
    data: text
    model: llama3-130m-explicit
    task: language-model
    curriculum: explicit
    override:
      task: {total_steps: 1000}

evaluations:
  questions:
    kind: catbabi
    protocols: [windowed, carried]
    modes:
      - {name: blockwise, eval_mode: blockwise}
  agreement:
    kind: duality
    runs: ["flat*"]
    trace_tokens: 64
    modes:
      - {name: simultaneous, eval_mode: simultaneous}
      - {name: sequential, eval_mode: sequential}
  perplexity:
    kind: perplexity
    max_tokens: 4096
    modes:
      - {name: blockwise, eval_mode: blockwise}
"""
