"""Run the steps that all jobs have in common: checks, publication and tracking. This package does not import torch."""
