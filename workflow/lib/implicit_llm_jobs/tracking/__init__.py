"""Write the journals of runs to MLflow."""
