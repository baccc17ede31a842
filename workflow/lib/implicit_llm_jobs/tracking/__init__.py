"""The journal of a run and the writer that brings it to MLflow."""
