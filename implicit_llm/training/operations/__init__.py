"""Operate a training job: checkpoints, stops, the watchdog and status lines, which do not change the trained model."""
