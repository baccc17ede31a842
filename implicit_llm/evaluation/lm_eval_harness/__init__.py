"""Downstream tasks through the Language Model Evaluation Harness (the package lm_eval)."""
