"""What every part of a run uses: loads, answers, counters, checkpoints, results."""
