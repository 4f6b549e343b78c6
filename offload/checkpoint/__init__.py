"""Models and optimizers on disk, of any size: through a window, whole or not at all."""
