"""Checks that need neither torch nor a GPU, made before anything is loaded."""
