"""Operating a training job: checkpoints, stops, the watchdog, status lines. Nothing here changes what is trained."""
