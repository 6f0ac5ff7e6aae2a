"""What a run shows and writes: console, metrics, timers, trackers, rollouts, reports."""
