"""The life of the processes of a run: who is alive, what each was doing, how they end."""
