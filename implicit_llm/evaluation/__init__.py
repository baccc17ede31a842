"""Evaluate trained models; `kinds` has one module for each kind of evaluation."""
